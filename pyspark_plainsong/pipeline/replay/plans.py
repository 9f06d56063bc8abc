"""The plan of a replay, saved before the first publish: its chunks are the same in every run.

A chunk is published atomically by the plan's producer, with the chunk's number as sequence id. So the topic recognizes
a repeated chunk as a duplicate, and stores the progress of the replay. This requires that a chunk's content never
changes: its bounds are determined once, and kept in a file in the archive.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from plainsong.cli.command import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark_plainsong.pipeline.files import Files

VERSION = 1
#: Maximum number of characters of the topic's name in a producer's name, which has at most 255 bytes.
TOPIC_CHARS = 60


@dataclass(frozen=True, slots=True)
class ReplayChunk:
    """Rows ``start <= key < start of the next chunk``; a key as text."""

    start: str
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One replay."""

    source: str
    """The name of the source, which stays the same wherever the files are mounted."""
    start: str
    end: str
    """The range ``start <= key < end``, keys as text; empty: no bound."""
    namespace: str
    topic: str
    generation: int
    """The generation of the topic that is published to."""
    attempt: int = 0
    """Counts replays of the same range; above 0 with ``--anew``."""
    chunks: tuple[ReplayChunk, ...] = ()
    done: int = 0
    """Chunks known to be published; one more may be."""
    as_read: dict[str, str] = field(default_factory=dict)
    """Fingerprints of files outside an archive: ``files``, which may have changed since; ``names``, which distinguishes
    files with the same path elsewhere. Plans of versions before 0.2 have no ``names``."""

    @property
    def family(self) -> str:
        """The prefix of all producers that publish rows of this source."""
        source = "\n".join([self.source, *([self.as_read["names"]] if "names" in self.as_read else [])])
        return f"replay:{hashlib.sha256(source.encode()).hexdigest()[:12]}:"

    def is_of(self, files: Mapping[str, str]) -> bool:
        """True if files with these fingerprints are those of the plan."""
        return all(files.get(name) == value for name, value in self.as_read.items())

    @property
    def producer(self) -> str:
        """The producer that publishes the chunks."""
        again = f":{self.attempt}" if self.attempt else ""
        bounds = f"{self.start or 'all'}-{self.end}"
        if len(bounds) > 81:  # two ids and a hyphen
            bounds = hashlib.sha256(bounds.encode()).hexdigest()[:16]
        return f"{self.family}{self.topic[:TOPIC_CHARS]}:{bounds}{again}"

    @property
    def file(self) -> str:
        """The name of the plan's file."""
        return hashlib.sha256(f"{self.namespace}:{self.topic}\n{self.producer}".encode()).hexdigest()[:16] + ".json"

    @property
    def lock(self) -> str:
        """The name of the lock that all replays of the same source into the same topic share."""
        aim = "\n".join(str(each) for each in _aim(self))
        return f"_{hashlib.sha256(aim.encode()).hexdigest()[:16]}.lock"

    @property
    def rows(self) -> int:
        """The rows of all chunks."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def is_done(self) -> bool:
        """True if all chunks are published."""
        return self.done >= len(self.chunks)

    def bounds(self, number: int) -> tuple[str, str]:
        """Return the keys of a chunk, ``start <= key < end``; an empty end means no bound."""
        last = number + 1 == len(self.chunks)
        return self.chunks[number].start, self.end if last else self.chunks[number + 1].start

    def overlaps(self, other: Plan) -> bool:
        """True if a row could be in both plans. Only plans of ids have bounds, and ids sort as text."""
        return (not self.end or other.start < self.end) and (not other.end or self.start < other.end)


class Plans:
    """The plans of one folder."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files = files
        self._folder = folder

    def save(self, plan: Plan) -> None:
        """Write a plan atomically."""
        fields = {"version": VERSION, "producer": plan.producer, **asdict(plan)}
        fields["chunks"] = [[chunk.start, chunk.rows] for chunk in plan.chunks]
        self._files.write(f"{self._folder}/{plan.file}", json.dumps(fields, indent=1).encode())

    def all(self) -> list[Plan]:
        """Load all plans. Raises CommandFailed: one cannot be read."""
        names = [name for name in self._files.names(self._folder) if name.endswith(".json") and name[0] not in "._"]
        return [plan for plan in map(self._load, names) if plan is not None]

    def chosen(self, wanted: Plan, *, any_range: bool, anew: bool) -> Plan:
        """Return the plan to carry out: one that was begun, or else ``wanted``, which has no chunks yet.

        Args:
          any_range: the user gave no range: continue an unfinished plan from the same start.
          anew: publish rows even if an earlier plan has published them.
        Raises:
          CommandFailed: rows would be published twice, or have changed; nothing was done.
        """
        alike = [plan for plan in self.all() if _aim(plan) == _aim(wanted)]
        same = [plan for plan in alike if (plan.start, plan.end) == (wanted.start, wanted.end)]
        begun = [plan for plan in (alike if any_range else same) if not plan.is_done and plan.start == wanted.start]
        if anew:
            again = [plan for plan in begun if plan.attempt and plan.is_of(wanted.as_read)]
            newest = max((plan.attempt for plan in alike), default=0)
            return max(again, key=lambda plan: plan.attempt, default=replace(wanted, attempt=1 + newest))
        if any_range and len(begun) == 1:
            return _as_it_was(begun[0], wanted)
        if same:
            return _as_it_was(max(same, key=lambda plan: plan.attempt), wanted)
        for plan in alike:
            if plan.overlaps(wanted):
                state = "has been replayed" if plan.is_done else "is being replayed"
                raise CommandFailed(
                    f"a part of this {state} into {plan.topic} already: from {plan.start or 'the first row'} "
                    f"to {plan.end or 'the last one'}",
                    hint=f"start after it (--from {plan.end}), or publish it again: --anew"
                    if plan.end
                    else "publish it again: --anew",
                    code=Exit.USAGE,
                )
        return wanted

    def _load(self, name: str) -> Plan | None:
        text = self._files.read(f"{self._folder}/{name}")
        if text is None:
            return None
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise ValueError("it has an unknown version")
            fields.pop("producer")
            chunks = tuple(ReplayChunk(str(start), int(rows)) for start, rows in fields.pop("chunks"))
            return Plan(**fields, chunks=chunks)
        except (ValueError, KeyError, TypeError) as error:
            raise CommandFailed(f"the plan {name} cannot be read: {error}", code=Exit.STORE) from error


def _as_it_was(plan: Plan, wanted: Plan) -> Plan:
    """Return the plan unchanged. Raises CommandFailed: its rows have changed since it was made."""
    if not plan.is_of(wanted.as_read):
        says = f"{plan.source}: the files are not those of the earlier, unfinished replay into {plan.topic}"
        raise CommandFailed(says, hint="restore them, or publish the current files: --anew", code=Exit.USAGE)
    return plan


def _aim(plan: Plan) -> Sequence[object]:
    return plan.source, plan.namespace, plan.topic, plan.generation
