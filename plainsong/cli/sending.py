"""What ``publish`` has sent so far, one piece after the other, and what it says when it ends early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.tables import show_count
from plainsong.cli.verb import failure_of
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong import Client, Receipt
    from plainsong.cli.inputs import Piece
    from plainsong.cli.progress import Progress


def messages_told(count: int) -> str:
    """``1 message``, ``12 345 messages``."""
    return "1 message" if count == 1 else f"{show_count(count)} messages"


class Sending:
    """What has been published so far, and what becomes of the rest when it ends early."""

    def __init__(self, client: Client, topic: str, ttl_s: int | None, progress: Progress) -> None:
        self.sent = 0
        self.first_id: str | None = None
        self.last_id: str | None = None
        self.client = client
        self.topic = topic
        self.ttl_s = ttl_s
        self._progress = progress
        self._under_way = 0

    def all_of(self, pieces: Iterable[Piece]) -> None:
        """Publish, one piece after the other.

        Raises:
          CommandFailed: it ended early; says what was published, what was not, and what is unknown.
        """
        try:
            for piece in pieces:
                self._one(piece)
        except KeyboardInterrupt:
            self._progress.clear()
            raise self._ended(CommandFailed("interrupted", code=Exit.INTERRUPTED), "unknown") from None
        except PlainsongError as error:
            self._progress.clear()
            if error.code == "topic_not_found" and not self.sent:
                raise
            raise self._ended(failure_of(error), error.outcome) from error
        except CommandFailed as error:
            self._progress.clear()
            raise self._ended(error, "not-applied") from error.__cause__
        self._progress.clear()

    def _one(self, piece: Piece) -> None:
        self._under_way = len(piece.items)
        receipt = self.publish(piece)
        self._under_way = 0
        self.sent += len(piece.items)
        self.first_id = self.first_id or (None if receipt.first_id is None else str(receipt.first_id))
        self.last_id = None if receipt.last_id is None else str(receipt.last_id)
        self._progress.show(self.sent, piece.read_bytes)

    def publish(self, piece: Piece) -> Receipt:
        """One request. Raises PlainsongError."""
        from plainsong import Outgoing  # here, so that help needs no client

        values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
        return self.client.publish(self.topic, values, ttl_s=self.ttl_s)

    @property
    def how(self) -> str:
        """What there is to say of it besides how many they were."""
        return ""

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        """``failed``, with how far it came; ``outcome`` is of the request under way."""
        unknown = self._under_way if outcome == "unknown" else 0
        failed.message += (": " if failed.code == Exit.INTERRUPTED else "; ") + self._how_far(known=not unknown)
        failed.outcome = "unknown" if unknown else "not-applied"
        failed.more = {**self.told(), "unknown": unknown}
        return failed

    def _how_far(self, *, known: bool) -> str:
        said = [f"{messages_told(self.sent)} published"]
        if self.last_id:
            said.append(f"the last is {self.last_id}")
        if self._under_way and known:
            said.append(f"number {self.sent + 1} and what follows were not")
        elif self._under_way:
            first, last = self.sent + 1, self.sent + self._under_way
            said.append(f"of number {first} to {last} nobody knows, what follows was not")
        else:
            said.append("what follows was not")
        return ", ".join(said)

    def told(self) -> dict[str, object]:
        """For programs."""
        return {"topic": self.topic, "messages": self.sent, "firstId": self.first_id, "lastId": self.last_id}
