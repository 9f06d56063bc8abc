"""The Delta table of a topic: each batch is one commit, through delta-rs.

A commit changes files and *application transactions* (``txn`` in Delta's log) together. They are named numbers of 64
bits, which the log keeps forever; of two concurrent commits that change the same one, only the first succeeds. An
archive keeps its state in them, so no other file has to agree with the log:

    plainsong:GEN                       number of the generation's batches
    plainsong:GEN:end:…                 the id before which all messages are archived, its four fields
    plainsong:GEN:start                 the publish time before which messages were pruned
    plainsong:GEN:rows:DAY              number of rows published on a day (UTC)
    plainsong:GEN:digest:DAY            the exclusive or of their checksums
    plainsong:GEN:days:…                the first and the last such day, in days since 1970
    plainsong:generation                the highest generation
    plainsong:replaced:DAY              number of commits that removed files of a day
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

from plainsong.cli.command import CommandFailed, Exit
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline.archive import layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable, Schema

    from pyspark_plainsong.pipeline.files import Files

#: The partition column: the day of the publish time, in UTC.
DAY: Final = "day"
#: The columns of the table and their types in Delta: the connector's, the generation, and what the archive adds.
COLUMNS: Final[Mapping[str, str]] = {
    "namespace": "string",
    "topic": "string",
    "generation": "integer",
    "message_id": "binary",
    "publish_timestamp": "timestamp",
    "seq_id": "integer",
    "write_timestamp": "timestamp",
    "payload_seq_id": "integer",
    "routing_key": "string",
    "headers": "map",
    "payload": "binary",
    "checksum": "long",
    DAY: "date",
}
_CONFIGURATION: Final = {"delta.dataSkippingStatsColumns": "generation,publish_timestamp"}
_LOG: Final = "_delta_log"
#: Commits that may come first before a commit gives up.
ATTEMPTS: Final = 100
#: The fields of an id: name, first byte, end.
_FIELDS: Final = (("publish", 0, 8), ("seq", 8, 10), ("write", 10, 18), ("payload_seq", 18, 20))


class Conflict(Exception):
    """Another commit changed the same state first; nothing was committed."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Number of rows, and the exclusive or of their checksums."""

    rows: int = 0
    digest: int = 0
    """64 bits, signed."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, self.digest ^ other.digest)


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of the table."""

    path: str
    """From the table's folder."""
    size: int
    day: str
    rows: int | None = None
    first_ms: int | None = None
    last_ms: int | None = None
    """The smallest and the largest publish time; None: the log does not say."""
    generations: tuple[int, int] | None = None
    """The smallest and the largest generation; None: the log does not say."""

    @property
    def stats(self) -> str:
        """The statistics as Delta's log has them."""
        if self.first_ms is None or self.last_ms is None or self.generations is None:
            return json.dumps({"numRecords": self.rows})
        low, high = ({"generation": of, "publish_timestamp": _timestamp(at)} for of, at in self._bounds())
        none = {"generation": 0, "publish_timestamp": 0}
        return json.dumps({"numRecords": self.rows, "minValues": low, "maxValues": high, "nullCount": none})

    def _bounds(self) -> list[tuple[int, int]]:
        assert self.generations is not None
        assert self.first_ms is not None
        assert self.last_ms is not None
        return list(zip(self.generations, (self.first_ms, self.last_ms), strict=True))

    def may_hold(self, start: bytes, end: bytes) -> bool:
        """True if the file may have ids ``start <= id < end``."""
        if self.first_ms is None or self.last_ms is None:
            first_ms = layout.day_start_ms(self.day)
            return first_ms <= layout.time_of(end) and layout.time_of(start) < first_ms + layout.DAY_MS
        return self.first_ms <= layout.time_of(end) and layout.time_of(start) <= self.last_ms

    def may_be_of(self, generation: int | None) -> bool:
        """True if the file may have messages of a generation; None: of any."""
        if generation is None or self.generations is None:
            return True
        return self.generations[0] <= generation <= self.generations[1]


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written and read back, and is not part of the table yet."""

    file: TableFile
    tally: Tally
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A committed batch."""

    number: int
    start: bytes
    end: bytes
    rows: int
    payload_bytes: int


class TopicTable:
    """One version of a topic's table; ``reload`` moves on to the newest.

    Args:
      folder: the table's folder, from the root of ``files``.
    """

    def __init__(self, files: Files, folder: str, delta: DeltaTable) -> None:
        self.files = files
        self.folder = folder
        self.delta = delta

    # --- opening ---

    @classmethod
    def open(cls, files: Files, namespace: str, topic: str) -> TopicTable | None:
        """Open a topic's table; None if there is none.

        Raises:
          CommandFailed: the topic has an archive of an earlier version, or the table cannot be opened, or its path has
            characters that delta-rs does not take.
        """
        folder = layout.topic_folder(namespace, topic)
        address = files.table(folder)
        names = files.names(folder)
        if any(name.startswith(layout.FORMER) for name in names):
            raise CommandFailed(
                f"{files.url(folder)} was written by an earlier version",
                hint="plainsong pipeline run archive migrate --root ROOT makes it a Delta table",
                code=Exit.STORE,
            )
        if _LOG not in names or not files.names(f"{folder}/{_LOG}"):
            return None
        return cls(files, folder, _opened(address))

    @classmethod
    def create(cls, files: Files, namespace: str, topic: str) -> TopicTable:
        """Open a topic's table, or create it."""
        from deltalake import DeltaTable

        folder = layout.topic_folder(namespace, topic)
        files.make_folder(folder)
        address = files.table(folder)
        with _own_errors(address):
            DeltaTable.create(
                address,
                schema(),
                mode="ignore",
                partition_by=[DAY],
                name=f"{namespace}:{topic}",
                description="Messages archived by plainsong",
                configuration=dict(_CONFIGURATION),
            )
        made = cls(files, folder, _opened(address))
        made.settle()
        return made

    def reload(self) -> None:
        """Move on to the newest version."""
        self.delta.update_incremental()

    def widen(self) -> None:
        """Add the columns that a table of an earlier version lacks; their values are null in its rows."""
        there = {field.name for field in self.delta.schema().fields}
        missing = [field for field in schema().fields if field.name not in there]
        if missing:
            self.delta.alter.add_columns(missing)
            self.settle()

    # --- state ---

    @property
    def version(self) -> int:
        """The number of the version."""
        return int(self.delta.version())

    def generations(self) -> list[int]:
        """Return the archived generations of the topic, ascending."""
        highest = self._number("generation") or 0
        return [each for each in range(1, highest + 1) if self._number(str(each)) is not None]

    def batches(self, generation: int) -> int:
        """Return the number of committed batches."""
        return self._number(str(generation)) or 0

    def end(self, generation: int) -> bytes:
        """Return the id before which all messages of a generation are archived."""
        parts = [(self._number(f"{generation}:end:{name}") or 0, end - start) for name, start, end in _FIELDS]
        return b"".join(value.to_bytes(size, "big") for value, size in parts)

    def start_ms(self, generation: int) -> int:
        """Return the publish time before which messages were pruned; 0 if none were."""
        return self._number(f"{generation}:start") or 0

    def tally(self, generation: int, day: str) -> Tally:
        """Return the figures of a day as its batches recorded them."""
        rows, digest = (self._number(f"{generation}:{what}:{day}") or 0 for what in ("rows", "digest"))
        return Tally(rows, digest)

    def days(self, generation: int) -> list[str]:
        """Return the days that may have messages, from the first that had one to the last, pruned ones left out."""
        first, last = (self._number(f"{generation}:days:{which}") for which in ("first", "last"))
        if first is None or last is None:
            return []
        epoch = date(1970, 1, 1)
        days = (epoch + timedelta(days=number) for number in range(first, last + 1))
        pruned_before = layout.day_of(self.start_ms(generation))
        return [day.isoformat() for day in days if day.isoformat() >= pruned_before]

    def all_files(self) -> list[TableFile]:
        """Return the files of this version, by day and path."""
        import pyarrow as pa

        found = [_file_of(row) for row in pa.table(self.delta.get_add_actions(flatten=True)).to_pylist()]
        return sorted(found, key=lambda each: (each.day, each.path))

    def _number(self, name: str) -> int | None:
        found = self.delta.transaction_version(f"plainsong:{name}")
        return None if found is None else int(found)

    def _replacing(self, day: str) -> dict[str, int]:
        """Return the application transaction that a commit which removes files of a day changes.

        delta-rs lets two commits remove the same files; without this both would add files with the same rows.
        """
        return {f"replaced:{day}": (self._number(f"replaced:{day}") or 0) + 1}

    # --- commits ---

    def append(self, generation: int, start: bytes, end: bytes, written: Sequence[Written]) -> Batch:
        """Commit a batch: the files become part of the table, and the archive then ends at ``end``.

        Raises:
          Conflict: the table's end is no longer ``start``; nothing was committed.
        """
        number = self.batches(generation) + 1
        rows, size = sum(each.tally.rows for each in written), sum(each.payload_bytes for each in written)
        state = {
            "generation": max(generation, self._number("generation") or 0),
            f"{generation}": number,
            **{f"{generation}:end:{name}": int.from_bytes(end[low:high], "big") for name, low, high in _FIELDS},
            **self._tallies(generation, written),
        }
        about = {"generation": generation, "start": start.hex(), "end": end.hex(), "rows": rows}
        self._commit([each.file for each in written], [], state, about)
        return Batch(number, start, end, rows, size)

    def _tallies(self, generation: int, written: Sequence[Written]) -> dict[str, int]:
        if not written:
            return {}
        state: dict[str, int] = {}
        for day in sorted({each.file.day for each in written}):
            tallies = (each.tally for each in written if each.file.day == day)
            total = sum(tallies, self.tally(generation, day))
            state |= {f"{generation}:rows:{day}": total.rows, f"{generation}:digest:{day}": total.digest}
        numbers = [layout.day_start_ms(each.file.day) // layout.DAY_MS for each in written]
        for which, pick in (("first", min), ("last", max)):
            known = self._number(f"{generation}:days:{which}")
            state[f"{generation}:days:{which}"] = pick(numbers if known is None else [*numbers, known])
        return state

    def prune(self, before: str) -> list[TableFile]:
        """Commit the removal of all days before a day; return their files, which ``vacuum`` removes later.

        Raises:
          Conflict: another process changed the same days; nothing was committed.
        """
        gone = [file for file in self.all_files() if file.day < before]
        state: dict[str, int] = {}
        for generation in self.generations():
            for day in self.days(generation):
                if day < before and self.tally(generation, day).rows:
                    state |= {f"{generation}:rows:{day}": 0, f"{generation}:digest:{day}": 0}
            state[f"{generation}:start"] = max(self.start_ms(generation), layout.day_start_ms(before))
        if gone:
            self._commit([], gone, state, {"pruned before": before}, changes=True)
        return gone

    def refill(self, generation: int, day: str, written: Sequence[Written], total: Tally) -> None:
        """Commit rows of a day that the table had lost; it then records ``total``.

        Raises:
          Conflict: another process changed the day; nothing was committed.
        """
        state = {f"{generation}:rows:{day}": total.rows, f"{generation}:digest:{day}": total.digest}
        self._commit([each.file for each in written], [], state, {"refilled": day, "generation": generation})

    def swap(self, added: Sequence[TableFile], removed: Sequence[TableFile]) -> None:
        """Commit other files with the same rows. Raises Conflict: another process removed one; nothing was committed."""
        self._commit(added, removed, {}, {}, changes=False)

    def _commit(
        self,
        added: Sequence[TableFile],
        removed: Sequence[TableFile],
        state: Mapping[str, int],
        about: Mapping[str, Any],
        *,
        changes: bool = True,
    ) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, RemoveAction

        at_ms = now_ms()
        state = {**state, **{name: value for each in removed for name, value in self._replacing(each.day).items()}}
        actions: list[AddAction | RemoveAction] = [
            *(AddAction(each.path, each.size, {DAY: each.day}, at_ms, changes, each.stats) for each in added),
            *(RemoveAction(each.path, changes, at_ms, each.size, {DAY: each.day}) for each in removed),
        ]
        transactions = [Transaction(f"plainsong:{name}", value, at_ms) for name, value in state.items()]
        properties = CommitProperties(
            {"plainsong": dict(about)} if about else None, max_commit_retries=ATTEMPTS, app_transactions=transactions
        )
        try:
            with _own_errors(self.files.url(self.folder)):
                self.delta.create_write_transaction(
                    actions, "append", self.delta.schema(), [DAY], commit_properties=properties
                )
        except CommitFailedError as error:
            raise Conflict(str(error)) from error
        self.reload()
        self.settle()

    def settle(self) -> None:
        """Make the log durable up to this version."""
        log = f"{self.folder}/{_LOG}"
        mine = f"{self.version:020d}."
        new = [name for name in self.files.names(log) if name.startswith(mine) or name == "_last_checkpoint"]
        self.files.settle([f"{log}/{name}" for name in new])


# --- shared by all ---------------------------------------------------------------------------------


def schema() -> Schema:
    """Return the table's schema in Delta."""
    from deltalake import Field, Schema
    from deltalake.schema import MapType, PrimitiveType

    headers = MapType(PrimitiveType("string"), PrimitiveType("string"), value_contains_null=True)
    kinds = {name: headers if kind == "map" else PrimitiveType(kind) for name, kind in COLUMNS.items()}
    return Schema([Field(name, kind, nullable=True) for name, kind in kinds.items()])


def tables(files: Files) -> list[tuple[str, str]]:
    """Return namespace and topic of all archives under a root, including those of an earlier version."""
    found = []
    for namespace in files.names(""):
        for topic in files.names(namespace):
            names = files.names(layout.topic_folder(namespace, topic))
            if any(name == _LOG or name.startswith(layout.FORMER) for name in names):
                found.append((namespace, topic))
    return found


def _opened(address: str) -> DeltaTable:
    from deltalake import DeltaTable

    with _own_errors(address):
        return DeltaTable(address)


class _own_errors:  # noqa: N801 - used as a statement
    """Wrap calls of the library: its errors become ours, except conflicts."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from deltalake.exceptions import CommitFailedError, DeltaError

        if isinstance(error, CommitFailedError):
            return
        if isinstance(error, (DeltaError, OSError, ValueError)):
            says = f"the Delta table {self._address} cannot be used: {str(error).splitlines()[0][:300]}"
            raise CommandFailed(says, code=Exit.STORE) from error


def _file_of(row: Mapping[str, Any]) -> TableFile:
    first, last = row.get("min.publish_timestamp"), row.get("max.publish_timestamp")
    low, high = row.get("min.generation"), row.get("max.generation")
    return TableFile(
        row["path"],
        int(row["size_bytes"]),
        str(row[f"partition.{DAY}"]),
        row["num_records"],
        None if first is None else int(first.timestamp() * 1000),
        None if last is None else int(last.timestamp() * 1000),
        None if low is None or high is None else (int(low), int(high)),
    )


def _timestamp(at_ms: int) -> str:
    day = layout.day_of(at_ms)
    second, ms = divmod(at_ms - layout.day_start_ms(day), 1000)
    return f"{day}T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{ms:03d}Z"
