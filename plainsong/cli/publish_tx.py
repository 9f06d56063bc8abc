"""``publish --tx``: everything in one transaction, so that committed readers see all of it or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.verb import failure_of
from plainsong.errors import CommittedWithErrors
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong import Client
    from plainsong.cli.inputs import Piece
    from plainsong.cli.progress import Progress


class SendingWhole:
    """What is published by one transaction.

    Args:
      timeout_s: of the transaction; None: the daemon's default.
    """

    how = " in one transaction"

    def __init__(
        self, client: Client, topic: str, ttl_s: int | None, progress: Progress, timeout_s: int | None
    ) -> None:
        self.sent = 0
        self.first_id: str | None = None
        self.last_id: str | None = None
        self.transaction: int | None = None
        self._client = client
        self._topic = topic
        self._ttl_s = ttl_s
        self._progress = progress
        self._timeout_s = timeout_s

    def all_of(self, pieces: Iterable[Piece]) -> None:
        """Begin, publish one piece after the other, commit.

        Raises:
          CommandFailed: nothing was published, or nobody knows.
        """
        try:
            self._all_of(pieces)
        except KeyboardInterrupt:
            raise self._ended(CommandFailed("interrupted", code=Exit.INTERRUPTED), "not-applied") from None
        except PlainsongError as error:
            if error.code == "topic_not_found" or isinstance(error, CommittedWithErrors):
                raise
            raise self._ended(failure_of(error), error.outcome) from error
        except CommandFailed as error:
            raise self._ended(error, "not-applied") from error.__cause__
        finally:
            self._progress.clear()

    def _all_of(self, pieces: Iterable[Piece]) -> None:
        from plainsong import Outgoing  # here, so that help needs no client

        count = 0
        with self._client.transaction(timeout_s=self._timeout_s, client_id="plainsong publish") as transaction:
            self.transaction = transaction.transaction.id
            for piece in pieces:
                if any(item.attributes for item in piece.items):
                    raise CommandFailed("a line has attributes, and --tx sends none", code=Exit.USAGE)
                values = [Outgoing(item.payload, item.ttl_s) if item.ttl_s else item.payload for item in piece.items]
                transaction.publish(self._topic, values, ttl_s=self._ttl_s)
                count += len(values)
                self._progress.show(count, piece.read_bytes)
        self.sent = count
        receipts = transaction.receipts.get(self._topic, [])
        if receipts and receipts[-1].last_id is not None:
            self.last_id = str(receipts[-1].last_id)
        if receipts and sum(receipt.count for receipt in receipts) == count and receipts[0].first_id is not None:
            self.first_id = str(receipts[0].first_id)  # else the first ones were stored, under ids not told here

    def _ended(self, failed: CommandFailed, outcome: str) -> CommandFailed:
        is_unknown = outcome == "unknown"
        failed.message += "; nobody knows whether it was committed" if is_unknown else "; nothing was published"
        if is_unknown and self.transaction is not None:
            failed.hint = f"ask later: plainsong tx show {self.transaction}"
        failed.outcome = "unknown" if is_unknown else "not-applied"
        failed.more = self.told()
        return failed

    def told(self) -> dict[str, object]:
        """For programs."""
        return {
            "topic": self._topic,
            "messages": self.sent,
            "firstId": self.first_id,
            "lastId": self.last_id,
            "transaction": None if self.transaction is None else str(self.transaction),
        }
