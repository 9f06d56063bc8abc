"""Plausible mistakes, each a small change of the code, to check that the simulation finds them.

``plant`` changes a module's source while it is imported; files are unchanged. A mistake whose place no longer exists is
an error, so the list follows the code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Mistake:
    """One planted mistake."""

    name: str
    promise: str
    """The promise that it breaks."""
    module: str
    right: str
    """The correct code; it occurs once in the module."""
    wrong: str
    inline: bool = False
    """True if it is a mistake only where the event loop writes commits itself."""


ACTOR, TOPIC = "actors.actor", "actors.topic"
STATE, DEDUPLICATION = "plainsong.protocol.topic.state", "plainsong.protocol.topic.deduplication"
DECISIONS, MANAGER = "plainsong.protocol.transactions.decisions", "plainsong.protocol.transactions.manager"
LEDGER, OUTCOMES = "plainsong.protocol.transactions.ledger", "plainsong.protocol.transactions.outcomes"
TRANSACTIONAL = "plainsong.protocol.topic.transactional"
CORE = "plainsong.protocol.topic.core"
STAGING = "plainsong.protocol.topic.staging"
UPKEEP = "plainsong.protocol.topic.upkeep"
CHAIN_RULES = "plainsong.protocol.topic.chain_rules"

#: The code between the start of a commit and the update of the cache.
_BETWEEN = """\
        if step.pointers:
            self._environment.pointers.begin(self.name, step.pointers)

    def _commit_ends(self, step: Step, *, is_durable: bool) -> None:
        self._commit_took_s = perf_counter() - self._commit_begun_s
        if step.pointers:
            pointers = self._environment.pointers
            pointers.end(step.pointers)
            if is_durable and pointers.begins is not None:
                pointers.begins.begun(step.pointers)

    def _committed(self, core: TopicCore, step: Step) -> None:
        pointers = self._environment.pointers
        if step.dropped:
            self._drop_pointers(core, step)
"""

MISTAKES = (
    Mistake(
        "answered before the commit",
        "durable",
        ACTOR,
        "                self._begin_commit(core, claim, turn, step)\n                return\n",
        "                complete_all(step.answers)\n                self._begin_commit(core, claim, turn, step)\n"
        "                return\n",
    ),
    Mistake(
        "a failed commit is acknowledged",
        "durable",
        ACTOR,
        "            if failed is not None:\n                raise failed\n",
        "",
    ),
    Mistake(
        "a failed request is reported as not having happened",
        "errors tell the truth",
        ACTOR,
        "            not operations\n            or isinstance(error, NothingWritten)",
        "            True\n            or isinstance(error, NothingWritten)",
    ),
    Mistake(
        "a replaced owner answers without asking the store",
        "one order",
        ACTOR,
        "            if self._shared and turn.answers:\n",
        "            if False:\n",
    ),
    Mistake(
        "answered while the disk works",
        "durable",
        ACTOR,
        "                ticket.prepare(answer)\n",
        "                ticket.settle(answer)\n",
        inline=True,
    ),
    Mistake(
        "a deposed owner continues",
        "one order",
        "tests.simulation.disk",
        "            self._refuse_if_deposed(claim)\n            self.compare(expect)",
        "            self.compare(expect)",
    ),
    Mistake(
        # The mistake also moves the cache and the wake-up of readers, since nothing reads the watermark within a step
        # of the core.
        "the watermark moves before the commit",
        "what is read stays",
        TOPIC,
        "        self._commit_begun_s = perf_counter()\n" + _BETWEEN + "        self._update_cache(core, step)\n",
        "        self._commit_begun_s = perf_counter()\n"
        "        if self.core is not None and self.core.state.metadata is not None:\n"
        "            self._update_cache(self.core, step)\n"
        "            self.core.state.advance_watermark()\n"
        "            parked = self.core.parking.take_reached(self.core.state.until)\n"
        "            complete_all([(each.ticket, self.core._span(each.look)) for each in parked])\n" + _BETWEEN,
    ),
    Mistake(
        "positions from the clock alone",
        "ids ascend",
        STATE,
        "        if now_ms > ts:\n            ts, seq = now_ms, 0",
        "        if now_ms != ts:\n            ts, seq = now_ms, 0",
    ),
    Mistake(
        "the topic's time goes back with the clock",
        "ids ascend",
        CORE,
        "        self.state.time_ms = max(self.state.time_ms, now.wall_ms)",
        "        self.state.time_ms = now.wall_ms",
    ),
    Mistake(
        "rows behind the mark are not replayed",
        "ids ascend",
        STATE,
        "            self.sequence.advance_past(ts_ms, sequence_id)\n            messages, size",
        "            messages, size",
    ),
    Mistake(
        "the mark forgets the last position",
        "ids ascend",
        STATE,
        "        self.sequence = PositionSequence(*mark.floor)",
        "        self.sequence = PositionSequence(0, -1)",
    ),
    Mistake(
        "a session is not checked",
        "once, by sequence ids",
        DEDUPLICATION,
        "    if epoch < producer.epoch:",
        "    if False and epoch < producer.epoch:",
    ),
    Mistake(
        "an opened session keeps its epoch",
        "once, by sequence ids",
        "plainsong.protocol.topic.producer_sessions",
        "    producer.epoch += 1\n",
        "    producer.epoch = max(1, producer.epoch)\n",
    ),
    Mistake(
        "a duplicate counts from the first id",
        "once, by sequence ids",
        DEDUPLICATION,
        "bisect_right(ids, pushed)",
        "bisect_right(ids, pushed) if ids[-1] <= pushed else 0",
    ),
    Mistake(
        "stamps behind the mark are not replayed",
        "once, by sequence ids",
        STATE,
        "        if high > producer.pushed:\n",
        "        if False:\n",
    ),
    Mistake(
        "the last sequence id is not remembered",
        "once, by sequence ids",
        DEDUPLICATION,
        "    dedup.producer.record(Result(dedup.ids[dedup.new], dedup.ids[-1], first, last, dedup.pointer))\n",
        "    dedup.producer.record(Result(dedup.ids[dedup.new], dedup.ids[dedup.new], first, last, dedup.pointer))\n",
    ),
    Mistake(
        "a producer's row is written ahead of its messages",
        "once, by sequence ids",
        "plainsong.protocol.topic.producer_sessions",
        "    last = producer.pushed if durable else producer.persisted",
        "    last = producer.pushed + 1 if durable else producer.persisted",
    ),
    Mistake(
        "a commit is seen before it is durable",
        "transactions are whole",
        MANAGER,
        "        step.read_pointer = self.ledger.head.read_pointer\n        return step",
        "        step.read_pointer = self.ledger.head.read_pointer\n"
        "        if step.changes:\n            self.visible.apply(step.changes, step.read_pointer)\n            step.changes.clear()\n"
        "        return step",
    ),
    Mistake(
        "readers see what is in progress",
        "transactions are whole",
        DECISIONS,
        "    ledger.begin(record)\n    step.changes.append(Change(opened=record.pointers))\n",
        "    ledger.begin(record)\n",
    ),
    Mistake(
        "an abort is decided before it has rolled back",
        "aborted is gone",
        DECISIONS,
        "    if not (ask.has_rows or record.topics):\n        return _aborted",
        "    if True:\n        return _aborted",
    ),
    Mistake(
        "a transaction that timed out leaves every list",
        "aborted is gone",
        DECISIONS,
        "    step.decide(record, Change(closed=record.pointers, listed=record.listed))",
        "    step.decide(record, Change(closed=record.pointers))",
    ),
    Mistake(
        "a time-out does not list its pointers",
        "aborted is gone",
        DECISIONS,
        "    record.listed = record.pointers\n    ledger.list_invalid(record)\n",
        "    record.listed = ()\n",
    ),
    Mistake(
        "an abort that has begun can be committed",
        "transactions are whole",
        DECISIONS,
        "        record.aborting = True\n        step.write_record(record)\n",
        "        pass\n",
    ),
    Mistake(
        "the start forgets an open transaction",
        "transactions are whole",
        MANAGER,
        "                ledger.begin(record)\n            elif",
        "                pass\n            elif",
    ),
    Mistake(
        "the start forgets the invalid list",
        "aborted is gone",
        MANAGER,
        "                ledger.list_invalid(record)\n            else:",
        "                pass\n            else:",
    ),
    Mistake(
        "numbers start over after a start",
        "numbers once",
        MANAGER,
        "        last = max(ledger.head.last, ledger.head.reserved, *known)\n",
        "        last = 0\n",
    ),
    Mistake(
        "a pointer that was answered is issued again",
        "numbers once",
        MANAGER,
        "        last = max(ledger.head.last, ledger.head.reserved, *known)\n",
        "        last = max(ledger.head.last, *known, 0)\n",
    ),
    Mistake(
        "a begin of Tephra's clients that a crash loses is on no list",
        "transactions are whole",
        MANAGER,
        "        ledger.unwritten = lost_begins(ledger.head, self.records, last)\n",
        "        ledger.unwritten = {}\n",
    ),
    Mistake(
        "a begin of Tephra's clients waits for a commit though its pointer is not reserved for them",
        "transactions are whole",
        LEDGER,
        "        reserved = self._tephra_last if record.tephra else self.head.reserved\n",
        "        reserved = self.head.reserved\n",
    ),
    Mistake(
        "a commit whose change set a crash has lost is not checked",
        "transactions are whole",
        DECISIONS,
        "    if ledger.may_lack_changes(record):\n",
        "    if False:\n",
    ),
    Mistake(
        "a publish is durable without its transaction's begin",
        "transactions are whole",
        TOPIC,
        "            return [*begins.begins(step.pointers), *step.operations]\n",
        "            return step.operations\n",
    ),
    Mistake(
        "only the first rows of a pointer are rolled back",
        "aborted is gone",
        TRANSACTIONAL,
        "    for run in pending.runs:\n        _negate_rows",
        "    for run in pending.runs[:1]:\n        _negate_rows",
    ),
    Mistake(
        "a rolled-back pointer may be written under again",
        "aborted is gone",
        "plainsong.protocol.topic.publish",
        '    if standing not in ("in_progress", "unknown"):',
        '    if standing not in ("in_progress", "unknown", "aborted", "invalid", "deciding"):',
    ),
    Mistake(
        "the cache is not cleared when an owner has gone",
        "one order",
        TOPIC,
        "        self._cache.clear()\n        if self._shared:\n            self._environment.pointers.leave(self.name)",
        "        if self._shared:\n            self._environment.pointers.leave(self.name)",
    ),
    Mistake(
        "the cache does not learn of rollbacks",
        "aborted is gone",
        TOPIC,
        "            self._cache.roll_back(core.state.prefix, pointer, first, last)",
        "            pass",
    ),
    Mistake(
        "decisions have the time of the clock",
        "as of a moment",
        LEDGER,
        "        head.decided_ms = max(head.decided_ms, now_ms, head.last // POINTERS_PER_MS)\n",
        "        head.decided_ms = now_ms\n",
    ),
    Mistake(
        "the service continues within a moment that was shown",
        "as of a moment",
        OUTCOMES,
        "        head.decided_ms = at_ms + 1\n",
        "        pass\n",
    ),
    Mistake(
        "a topic's promise of a moment is not durable",
        "as of a moment",
        STATE,
        "        return at_ms >= max(self.marked_ms, self.sequence.last_ts_ms)\n",
        "        return False\n",
    ),
    Mistake(
        "a moment shows what was decided later",
        "as of a moment",
        LEDGER,
        "                if record.decided_ms <= at_ms:\n                    break\n",
        "                break\n",
    ),
    Mistake(
        "a moment shows what was open",
        "as of a moment",
        LEDGER,
        "            found = set(self.in_progress[: bisect_left(self.in_progress, stop)])\n",
        "            found = set[int]()\n",
    ),
    Mistake(
        "a parked poll is not woken by new messages",
        "polls wake",
        CORE,
        "                (parked.ticket, self._span(parked.look)) for parked in self.parking.take_reached(self.state.until)\n",
        '                (parked.ticket, self._span(parked.look)) for parked in self.parking.take_reached(b"")\n',
    ),
    Mistake(
        "a commit does not close the topics first",
        "transactions are whole",
        DECISIONS,
        "        return CloseFirst()  # a topic was enlisted in this very step",
        "        pass",
    ),
    Mistake(
        "a topic writes without being enlisted",
        "transactions are whole",
        "plainsong.protocol.topic.publish",
        '    if not state.enlistment.holds(pointer):\n        raise _not_enlisted(state, pointer)\n    return "invalid"',
        '    return "invalid"',
    ),
    Mistake(
        "two requests of a batch get one position",
        "ids once",
        STATE,
        "        self.last_ts_ms, self.last_sequence_id = ts, seq - 1\n        return runs",
        "        self.last_ts_ms, self.last_sequence_id = ts, max(-1, seq - 2) if count == 0 and len(runs) and runs[-1].length == 3 else seq - 1\n"
        "        return runs",
    ),
    Mistake(
        "attempts that lost are published too",
        "transactions are whole",
        STAGING,
        "    if segments is None:\n        return Stored(",
        "    if True:\n        return Stored(",
    ),
    Mistake(
        "a staged store that is sent again is stored again",
        "once, by sequence ids",
        STAGING,
        "        record_store(pending, request, dedup)\n    state.changed.add(pending.pointer)\n",
        "        pass\n    state.changed.add(pending.pointer)\n",
    ),
    Mistake(
        "expiry is a second late",
        "expiry is exact",
        STATE,
        "self.time_ms - metadata.properties.ttl_ms)",
        "self.time_ms - metadata.properties.ttl_ms - 1000)",
    ),
    Mistake(
        "a message's own time to live is ignored",
        "expiry is exact",
        "plainsong.protocol.topic.visibility",
        "        expires_ms = expires_ms_of(position, row.ttl_s)\n",
        "        expires_ms = 0\n",
    ),
    Mistake(
        "a longer time to live revives expired messages",
        "expiry is exact",
        UPKEEP,
        "    changed = replace(old, properties=properties, updated_ms=state.time_ms, floor_ms=state.oldest_ms)\n",
        "    changed = replace(old, properties=properties, updated_ms=state.time_ms)\n",
    ),
    Mistake(
        "what readers saw expire is forgotten with the owner",
        "expiry is exact",
        CORE,
        "        ahead = to_mark or (bool(step.looks) and not now.low_space and state.expires_ahead())\n",
        "        ahead = to_mark\n",
    ),
    Mistake(
        "the janitor removes messages a second early",
        "expiry is exact",
        UPKEEP,
        "        expired=expired_range(prefix, state.oldest_ms),",
        "        expired=expired_range(prefix, state.oldest_ms + 1000),",
    ),
    Mistake(
        "a deleted topic is cleaned at once",
        "deleted can come back",
        UPKEEP,
        "state.time_ms < metadata.deleted_ms + ask.delete_grace_ms:",
        "state.time_ms < metadata.deleted_ms:",
    ),
    Mistake(
        "a deleted topic can be restored forever",
        "deleted can come back",
        UPKEEP,
        "    if ask.grace_ms is not None and state.time_ms >=",
        "    if ask.grace_ms is None and state.time_ms >=",
    ),
    Mistake(
        "a recreated topic shows the one before",
        "deleted can come back",
        UPKEEP,
        "    generation = 1 if old is None else old.generation + 1\n",
        "    generation = 1 if old is None else old.generation\n",
    ),
    Mistake(
        "a restore counts what began while the backup was read",
        "transactions are whole",
        "actors.restoring",
        '        if not self._manifest["exact"]:\n',
        "        if False:\n",
    ),
    Mistake(
        "a rollback adds no entry to the chain",
        "a chain is whole",
        TRANSACTIONAL,
        "        add_entry(state, step, ROLLBACK, p=pointer, f=first, l=last)\n",
        "",
    ),
    Mistake(
        "a publish of stored messages adds no entry to the chain",
        "a chain is whole",
        CHAIN_RULES,
        "    step.add_link(chain_prefix(state), position, chain.next(position, record))\n\n\ndef chain_prefix",
        "\n\ndef chain_prefix",
    ),
    Mistake(
        "the next owner continues without the last link",
        "a chain is whole",
        CHAIN_RULES,
        "        chain.number, chain.position, chain.link = entry.number, entry.position, entry.link\n",
        "        chain.number, chain.position = entry.number, entry.position\n",
    ),
    Mistake(
        "the chain does not know of messages' own times to live",
        "a chain is whole",
        CHAIN_RULES,
        "            own = None if ttls_s is None else ttls_s[start:stop]\n",
        "            own = None\n",
    ),
)


def named(name: str) -> Mistake:
    """Return the mistake with that name. Raises KeyError."""
    return {each.name: each for each in MISTAKES}[name]


class _Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, mistake: Mistake) -> None:
        self._mistake = mistake

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mistake.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=spec.origin)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        origin = str(module.__spec__.origin)
        module.__file__ = origin
        exec(
            compile(with_mistake(Path(origin).read_text(encoding="utf-8"), self._mistake), origin, "exec"),
            module.__dict__,
        )


def with_mistake(source: str, mistake: Mistake) -> str:
    """Return the source with the mistake. Raises LookupError unless its place occurs exactly once."""
    if source.count(mistake.right) != 1:
        raise LookupError(f"{mistake.name!r}: its place occurs {source.count(mistake.right)} times in {mistake.module}")
    return source.replace(mistake.right, mistake.wrong)


def plant(mistake: Mistake) -> None:
    """Plant the mistake in later imports. Raises RuntimeError if its module has been imported already."""
    if mistake.module in sys.modules:
        raise RuntimeError(f"{mistake.module} has been imported already")
    sys.meta_path.insert(0, _Planting(mistake))
