"""Audit messages as a platform would publish them, any number of them, the same ones for the same seed.

A few programs run most of the time, a few datasets are in most of what they do. Runs overlap; each reads its inputs,
writes its outputs and touches some datasets in ways nobody knows. People edit the metadata of what they own. Events
come late and out of order, some are published twice, and a given part of the messages is bad in one of many ways.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pipeline.audit.bad import spoiled
from pipeline.audit.world import Program, World, make_world

if TYPE_CHECKING:
    from collections.abc import Iterator

#: 2025-01-01. Not now, so that a seed means the same messages on every day.
START_MS: Final = 1_735_689_600_000
SPAN_MS: Final = 30 * 86_400_000
#: Parts of the messages.
METADATA_PART: Final = 0.04
REPEATED_PART: Final = 0.002
LATE_PART: Final = 0.05
MAX_LATE_MS: Final = 600_000
#: Runs that are under way at once.
RUNS_AT_ONCE: Final = 12


@dataclass
class _Run:
    program: Program
    run: str
    user: str
    left: list[tuple[str, str]]


@dataclass
class _Metadata:
    properties: dict[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"properties": dict(self.properties), "tags": list(self.tags)}


def payloads(
    messages: int, seed: int, *, bad: float = 0.0, start_ms: int = START_MS, span_ms: int = SPAN_MS
) -> Iterator[bytes]:
    """So many payloads, in the order of their publication; a part `bad` of them unreadable.

    Args:
      messages: how many, the bad and the repeated ones included.
      start_ms, span_ms: the events lie in this time, in milliseconds since 1970.
    """
    rng = random.Random(seed)
    last = b""
    events = _events(rng, make_world(rng), messages, start_ms, span_ms)
    for _ in range(messages):
        if rng.random() < bad:
            yield spoiled(rng, next(events))
        elif last and rng.random() < REPEATED_PART:
            yield last
        else:
            last = json.dumps(next(events), separators=(",", ":"), ensure_ascii=False).encode()
            yield last


def _events(rng: random.Random, world: World, messages: int, start_ms: int, span_ms: int) -> Iterator[dict[str, Any]]:
    """Events without end, some `messages` of them in the span."""
    runs: list[_Run] = []
    metadata: dict[str, _Metadata] = {}
    number = 0
    while True:
        now_ms = start_ms + span_ms * min(number, messages) // max(messages, 1)
        late_ms = rng.randrange(MAX_LATE_MS) if rng.random() < LATE_PART else 0
        common = {"version": 1, "time": max(start_ms, now_ms - late_ms), "namespace": world.namespace}
        number += 1
        if rng.random() < METADATA_PART:
            yield {**common, **_edit(rng, world, metadata)}
            continue
        if len(runs) < RUNS_AT_ONCE:
            runs.append(_begin(rng, world))
        run = rng.choice(runs)
        dataset, access = run.left.pop()
        if not run.left:
            runs.remove(run)
        yield {
            **common,
            "type": "access",
            "user": run.user,
            "program": run.program.name,
            "run": run.run,
            "dataset": dataset,
            "access": access,
        }


def _begin(rng: random.Random, world: World) -> _Run:
    """A run with its accesses to come, the last of them first: reads, then writes, some of them again and again."""
    program = world.some_program(rng)
    reads = [(name, "read") for name in program.inputs for _ in range(rng.choice((1, 1, 1, 2, 5)))]
    writes = [(name, "write") for name in program.outputs for _ in range(rng.choice((1, 1, 2)))]
    unknown = [(world.some_dataset(rng), "unknown")] if rng.random() < 0.05 else []
    user = program.owner if rng.random() < 0.9 else world.some_user(rng)
    return _Run(program, f"{rng.getrandbits(128):032x}", user, [*reversed([*reads, *unknown, *writes])])


def _edit(rng: random.Random, world: World, metadata: dict[str, _Metadata]) -> dict[str, Any]:
    """Somebody gives an entity a property or a tag, or takes one away."""
    entity = f"dataset:{world.some_dataset(rng)}" if rng.random() < 0.8 else f"program:{world.some_program(rng).name}"
    has = metadata.setdefault(entity, _Metadata())
    previous = has.as_json()
    added: dict[str, Any] = {"properties": {}, "tags": []}
    removed: dict[str, Any] = {"properties": {}, "tags": []}
    what = rng.random()
    if what < 0.5:
        key = rng.choice(("owner", "quality", "retention", "source", "übersicht"))
        if key in has.properties:
            removed["properties"][key] = has.properties[key]
        added["properties"][key] = has.properties[key] = (
            f"{rng.choice(('low', 'high', 'new', 'old'))}-{rng.randrange(100)}"
        )
    elif what < 0.8 or not has.tags:
        tag = rng.choice(("raw", "pii", "gold", "deprecated", "daily", "reviewed"))
        if tag not in has.tags:
            has.tags.append(tag)
            added["tags"].append(tag)
    else:
        removed["tags"].append(has.tags.pop(rng.randrange(len(has.tags))))
    changes = {"previous": previous, "added": added, "removed": removed}
    return {"type": "metadata", "user": world.some_user(rng), "entity": entity, **changes}
