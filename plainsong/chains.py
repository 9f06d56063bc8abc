"""Chained topics, for clients that verify them: the head to keep, the verification and its report."""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plainsong.protocol.errors import GenerationChanged, InvalidParameter, MalformedBody
from plainsong.protocol.ids import ID_BYTES, NO_PAYLOAD_PART, POSITION_BYTES, published_ms, shown_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.protocol.topic.verify import Verification, Verifier

_HINT = "give the output of `plainsong topic head TOPIC --json`"


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The last entry of a topic's chain: keep it, to prove later that nothing before it has changed."""

    topic: str
    """``namespace:topic``."""
    generation: int
    count: int
    """The number of entries, which is the number of the last one."""
    id: str
    """The id of the last entry."""
    hash: str
    """Its link, in hex: SHA-256 of what it adds and of the previous link."""
    at_ms: int
    """The time when it was written."""
    signature: Mapping[str, Any] | None = None
    """``id``, ``timestamp``, ``payload`` and ``signature`` as Standard Webhooks defines them; None: it is not signed."""

    @classmethod
    def of(cls, found: object) -> ChainHead:
        """A head as the daemon and ``plainsong topic head TOPIC --json`` write it. Raises InvalidParameter."""
        try:
            fields: Any = found
            head = cls(
                str(fields["topic"]),
                int(fields["generation"]),
                int(fields["count"]),
                str(fields["id"]),
                str(fields["hash"]),
                int(fields.get("atMs", 0)),
                fields.get("signature"),
            )
            is_head = len(bytes.fromhex(head.id)) == ID_BYTES and len(bytes.fromhex(head.hash)) == 32
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidParameter(f"this is not the head of a chain: {error!r}", hint=_HINT) from None
        if not is_head:
            raise InvalidParameter(
                "this is not the head of a chain: its id or its hash has the wrong length", hint=_HINT
            )
        return head

    @classmethod
    def parse(cls, text: str | bytes) -> ChainHead:
        """A head as JSON. Raises InvalidParameter."""
        try:
            return cls.of(json.loads(text))
        except ValueError:
            raise InvalidParameter("this is not the head of a chain: it is not JSON", hint=_HINT) from None

    def shown(self) -> dict[str, Any]:
        """Return the head in the daemon's JSON form."""
        return {
            "topic": self.topic,
            "generation": self.generation,
            "count": self.count,
            "id": self.id,
            "atMs": self.at_ms,
            "hash": self.hash,
            "signature": self.signature,
        }


@dataclass(frozen=True, slots=True)
class ChainFault:
    """A contradiction between a topic and its chain."""

    kind: str
    """``changed``, ``removed``, ``inserted``, ``unreadable``, ``hidden`` (rolled back, but no entry records it), ``shown``
    (not rolled back, but an entry records a rollback), ``entry-changed``, ``entry-removed``, ``other-chain``, ``cut-off``."""
    id: str
    """The id at which it was found."""
    detail: str


@dataclass(frozen=True, slots=True)
class ChainReport:
    """The result of verifying a chained topic."""

    head: ChainHead
    """The last entry that was verified: keep it for the next time."""
    messages: int
    """The number of messages that are unchanged since they were published."""
    entries: int
    begins_at: str | None
    """The id at which the chain begins; None: its beginning has expired."""
    expired: int
    """Entries with messages that have expired, or that a restore removed with their transaction: their links are right,
    but these messages cannot be verified."""
    set_aside: int
    """Entries with rows that an operator has set aside."""
    found: int
    """Entries that the daemon added when it started, for rows that a crash had left without one."""
    restored: int
    """The number of times the topic was restored from a backup."""
    known: str | None
    """The state of the given head: ``found``, or ``cleaned`` if its entry has expired; None if none was given, or if it
    is a fault."""
    faults: tuple[ChainFault, ...]
    """In the order of their ids, at most 100."""
    more_faults: int
    """Faults beyond those."""

    @property
    def is_good(self) -> bool:
        """True if the topic matches its chain."""
        return not self.faults

    def shown(self) -> dict[str, Any]:
        """The verdict in the form that ``plainsong topic verify TOPIC --json`` prints."""
        return {
            "good": self.is_good,
            "head": self.head.shown(),
            "messages": self.messages,
            "entries": self.entries,
            "beginsAt": self.begins_at,
            "expired": self.expired,
            "setAside": self.set_aside,
            "found": self.found,
            "restored": self.restored,
            "known": self.known,
            "faults": [{"kind": each.kind, "id": each.id, "detail": each.detail} for each in self.faults],
            "moreFaults": self.more_faults,
        }


class Verifying:
    """Verifies a topic page by page: ``page`` returns the next request, and ``take`` processes the response.

    Three passes: the entries alone, to collect rollbacks and rows set aside; the entries with the messages they cover,
    up to the head at the start; then the entries added since, alone.
    """

    def __init__(self, head: ChainHead, known: ChainHead | None) -> None:
        # Imported here, since most clients never verify a topic.
        from plainsong.protocol.topic.verify import KnownHead, Verifier

        self._head = head
        expected = None
        if known is not None:
            if known.topic != head.topic:
                raise InvalidParameter(f"the known head is of topic {known.topic}, not of {head.topic}")
            position = _position(known.id)
            expected = KnownHead(known.generation, known.count, position, bytes.fromhex(known.hash))
        named = KnownHead(head.generation, head.count, _position(head.id), bytes.fromhex(head.hash))
        self._verifier: Verifier = Verifier(head.topic, head.generation, expected, named)
        self._stage = "survey"
        self._after: str | None = None
        self._until = ""
        self._undecided: set[int] = set()
        self._later: list[tuple[bytes, bytes]] = []

    def page(self) -> tuple[str | None, bool] | None:
        """Return the next request: the id to read after, and whether to include messages; None at the end."""
        return None if self._stage == "done" else (self._after, self._stage == "verify")

    def take(self, page: Mapping[str, Any]) -> None:
        """Process a page. Raises GenerationChanged, MalformedBody."""
        try:
            self._take(page)
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise MalformedBody(f"the daemon's answer is not a page of a chain: {error!r}") from error

    def _take(self, page: Mapping[str, Any]) -> None:
        if page["head"]["generation"] != self._head.generation:
            raise GenerationChanged(
                f"topic {self._head.topic} was created again during the verification", hint="verify it again"
            )
        entries = [(_position(each["id"]), b64decode(each["base64"])) for each in page["entries"]]
        self._undecided = set(map(int, page["undecided"]))
        if self._stage == "verify":
            self._verify(entries, page)
        elif self._stage == "survey":
            for entry in entries:
                self._verifier.survey(*entry)
        else:
            self._later += entries
        if self._stage == "later" and not self._until:
            self._until = page["head"]["id"]
        self._after = page["next"]
        # A stage ends at the head it started with, whatever is published later. If the page ends with a stored message
        # at the head's position, the entry that covers it is still to come.
        until = _position(self._until or self._head.id)
        if (
            self._after is None
            or _position(self._after) > until
            or (_position(self._after) == until and self._after.endswith(NO_PAYLOAD_PART.hex()))
        ):
            self._end_stage()

    def _verify(self, entries: list[tuple[bytes, bytes]], page: Mapping[str, Any]) -> None:
        oldest_ms, now_ms = int(page["oldestMs"]), int(page["nowMs"])
        rows, at = page["messages"], 0
        for position, value in entries:
            while at < len(rows) and _position(rows[at]["id"]) <= position:
                self._take_message(rows[at], oldest_ms)
                at += 1
            self._verifier.entry(position, value, oldest_ms=oldest_ms, now_ms=now_ms)
        for row in rows[at:]:
            self._take_message(row, oldest_ms)

    def _take_message(self, shown: Mapping[str, Any], oldest_ms: int) -> None:
        """Process a message, a row that publishes stored messages, or a stored message."""
        from plainsong.protocol.topic.chain import ChainedRow, StoredRow, item_of, row_of

        message_id = bytes.fromhex(shown["id"])
        position = message_id[:POSITION_BYTES]
        if "row" in shown:
            value = b64decode(shown["row"])
            if message_id.endswith(NO_PAYLOAD_PART):
                self._verifier.row(row_of(position, value), oldest_ms)
            else:
                self._verifier.stored(StoredRow(message_id, value))
            return
        item = None if shown["base64"] is None else item_of(position, b64decode(shown["base64"]))
        pointer, ttl_s = int(shown.get("writePointer", 0)), shown.get("ttlSeconds")
        self._verifier.row(ChainedRow(position, item, pointer, shown.get("attributes", {}), ttl_s), oldest_ms)

    def _end_stage(self) -> None:
        if self._stage == "survey":
            self._stage, self._after = "verify", None
        elif self._stage == "verify":
            # Rollbacks since the survey are explained by later entries.
            self._stage, self._after = "later", self._head.id
        else:
            self._stage = "done"

    def report(self) -> ChainReport:
        """Return the report; call it after the last page."""
        found: Verification = self._verifier.end(undecided=self._undecided, later=self._later)
        last = found.last
        head = self._head
        if last is not None:
            id_of_last = shown_id(last.position)
            at_ms = published_ms(last.position)
            head = ChainHead(head.topic, head.generation, last.number, id_of_last, last.link.hex(), at_ms)
        if head.id == self._head.id and head.hash == self._head.hash:
            head = self._head
        return ChainReport(
            head,
            found.messages,
            found.entries,
            None if found.begun is None else shown_id(found.begun),
            found.expired,
            found.set_aside,
            found.found,
            found.restored,
            found.known or None,
            tuple(ChainFault(each.kind, each.id, each.detail) for each in found.faults),
            found.more_faults,
        )


def _position(message_id: str) -> bytes:
    return bytes.fromhex(message_id)[:POSITION_BYTES]
