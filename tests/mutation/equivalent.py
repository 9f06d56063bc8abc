"""Mutants that no test can kill, because they keep all promises of the code, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.mutation.mutants import Mutant


@dataclass(frozen=True, slots=True)
class Equivalent:
    """An equivalent mutant, identified by its line's text, not by the line's number."""

    module: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Mutants that are equivalent everywhere: lines without ``part``, or with ``instead`` in place of it."""

    part: str
    instead: str
    why: str


KINDS = (
    Kind('"big")', ")", "big-endian is the default byte order since Python 3.11"),
    Kind('.encode("ascii")', '.encode("ASCII")', "names of encodings are the same in either case"),
    Kind('.decode("ascii")', '.decode("ASCII")', "names of encodings are the same in either case"),
    Kind("strict=True", "strict=False", "both have the same length; strict guards against later mistakes"),
    Kind(", strict=True)", ", )", "both have the same length; strict guards against later mistakes"),
)

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "ids",
        "if timestamp_ms <= 0:",
        "if timestamp_ms < 0:",
        "the bound at the millisecond 0 is the first bound either way",
    ),
    Equivalent("ids", 'raw = b""', 'raw = b"XXXX"', "not an id either: both have the wrong length"),
    Equivalent(
        "transactions/manager",
        'return "in_progress" if record.state == "unknown" else record.state',
        'return "in_progress" if record.state == "XXunknownXX" else record.state',
        "a record is never unknown: it is compared only for the type checker",
    ),
    Equivalent(
        "transactions/view",
        "self._looked_up = 0",
        "self._looked_up = 1",
        "affects only when ranges of pointers are computed, not the result",
    ),
    Equivalent("topic/visibility", "self.done = False", "self.done = None", "only its truth value is used"),
    Equivalent(
        "topic/visibility",
        "flags = {value[0] if value else -1 for _, value in rows}",
        "flags = {value[0] if value else +1 for _, value in rows}",
        "an empty value has neither of the two flags either way",
    ),
    Equivalent(
        "topic/chain_rules",
        "chain.due = False",
        "chain.due = True",
        "what is due is written once: another look finds nothing",
    ),
    Equivalent(
        "topic/chain_rules",
        "chain.due = False",
        "chain.due = None",
        "only its truth value is used",
    ),
    Equivalent(
        "transactions/decisions",
        "record.read_pointer, began, began, tuple(invalids), tuple(sorted(then_open)), first_short, record.type",
        "record.read_pointer, began, None, tuple(invalids), tuple(sorted(then_open)), first_short, record.type",
        "the caller, a checkpoint, replaces it with its own write pointer",
    ),
    Equivalent("transactions/view", "listed = False", "listed = None", "only its truth value is used"),
    Equivalent(
        "topic/core",
        "if max(len(self._by_since), len(self._by_deadline)) <= 64 + 2 * len(self._parked):",
        "if max(len(self._by_since), len(self._by_deadline)) < 64 + 2 * len(self._parked):",
        "affects only when ended polls are dropped from the heaps, not which ones wake",
    ),
    Equivalent(
        "page",
        "columns = range(ITEM_HEAD_BYTES, start)",
        "columns = range(ITEM_HEAD_BYTES, )",
        "compares ids, which all differ: the items are cut one by one, with the same result but slower",
    ),
    Equivalent(
        "page",
        "if size <= 0xFFFF:",
        "if size < 0xFFFF:",
        "one prefix more or less in the cache affects only the speed, not the bytes",
    ),
    Equivalent(
        "transactions/view",
        "listed = False",
        "listed = True",
        "an equal frozen set is made again if nothing was listed",
    ),
    Equivalent(
        "transactions/view",
        "if pointer < 0:",
        "if pointer < 1:",
        "no row has the pointer 0: publishes refuse it, and rows without a pointer never get here",
    ),
    Equivalent(
        "transactions/manager",
        "self._freezings += 1",
        "self._freezings -= 1",
        "a freeze is identified by its number, which is unique and not 0 either way",
    ),
    Equivalent(
        "topic/chain_rules",
        "items = [] if alike else batch.items_from(first)",
        "items = [] if (alike) and False else batch.items_from(first)",
        "for rows that are alike the wire form is digested, and the items are not used",
    ),
    Equivalent(
        "page",
        "if alike is None:",
        "if (alike is None) or True:",
        "the items are cut, or counted, one by one, with the same result but slower",
    ),
    Equivalent(
        "topic/publish",
        "end = begin if last is first else last + NO_PAYLOAD_PART",
        "end = begin if (last is first) and False else last + NO_PAYLOAD_PART",
        "the same bytes are made again",
    ),
    *(
        Equivalent(
            "topic/publish",
            "return publish(state, step, Publish(PublishRequest([message]), len(message)), now)",
            f"return publish(state, step, Publish(PublishRequest([message]), {size}), now)",
            "only the mailbox uses the size, and the ask has left it",
        )
        for size in ("", "None")
    ),
    Equivalent(
        "topic/deduplication",
        "if not new or not request.messages:",
        "if not new and not request.messages:",
        "an equal request is made; one without messages has one id, and is either new or a duplicate",
    ),
    Equivalent(
        "transactions/decisions",
        "record.frozen = 0",
        "record.frozen = None",
        "only its truth value is used otherwise",
    ),
    Equivalent(
        "topic/step",
        'self._prefix = b""',
        "self._prefix = None",
        "set with the first batch, and not used before",
    ),
    Equivalent(
        "page",
        "known = _LENGTHS.get(size)",
        "known = None",
        "a prefix of the same bytes is made each time",
    ),
    Equivalent(
        "topic/publish",
        "return publish(state, step, Publish(PublishRequest(ask.messages), ask.size), now)",
        "return publish(state, step, Publish(PublishRequest(ask.messages), None), now)",
        "only the mailbox uses the size, and the ask has left it",
    ),
    Equivalent(
        "page",
        "if len(view) >= _CUT_AT_ONCE * calcsize(row):",
        "if len(view) > _CUT_AT_ONCE * calcsize(row):",
        "exactly that many rows are cut one by one instead: the same fields, but slower",
    ),
)

_WHY = {(each.module, each.before, each.after): each.why for each in EQUIVALENT}


def why_equivalent(mutant: Mutant) -> str | None:
    """Return the reason; None if a test is missing."""
    for kind in KINDS:
        if kind.part in mutant.before and _is_same(mutant, kind):
            return kind.why
    return _WHY.get((mutant.module, mutant.before, mutant.after))


def _is_same(mutant: Mutant, kind: Kind) -> bool:
    parts = mutant.before.split(kind.part)
    changed = (
        kind.part.join(parts[:place]) + kind.instead + kind.part.join(parts[place:]) for place in range(1, len(parts))
    )
    return mutant.after in changed
