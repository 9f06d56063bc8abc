"""A lightweight transaction in the hands of a thread."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from typing import Self

    from plainsong.core.producing.lightweight import Lightweight, LightweightState
    from plainsong.messages import Receipt
    from plainsong.sync.producer import Producer
    from plainsong.sync.sent import ProducedWhole


class LightweightTransaction:
    """Messages of one routing key that go in together or not at all; made by ``Producer.begin``.

    They stay here until ``commit``, which is one publish. In a ``with`` block what was not committed is aborted at its
    end, and what is being committed is waited for. For one thread at a time.
    """

    def __init__(self, producer: Producer, held: Lightweight) -> None:
        self._producer = producer
        self._held = held
        self._sent: ProducedWhole | None = None

    def __repr__(self) -> str:
        return f"<LightweightTransaction of {self.routing_key!r}, {self.state}>"

    @property
    def routing_key(self) -> str:
        """What its messages belong to."""
        return self._held.routing_key

    @property
    def state(self) -> LightweightState:
        """``open``, ``committing``, ``committed``, ``aborted``; ``unknown`` when nobody can know whether it took."""
        self._held.expire(monotonic())
        return self._held.state

    @property
    def size(self) -> int:
        """Serialized bytes written so far."""
        return self._held.size

    def __len__(self) -> int:
        return len(self._held)

    def write(self, message: Any, *, sequence_id: int | None = None, ttl_s: int | None = None) -> None:
        """Add a message; nothing is sent.

        Raises:
          MaxTransactionSizeExceeded: it would have more than 16 MiB of serialized bytes. NotEncodable,
            InvalidParameter. The message is not part of it, and the transaction is still open.
          NoTransaction, TransactionTimedOut: it has ended.
        """
        self._held.write(message, sequence_id=sequence_id, ttl_s=ttl_s, now_s=monotonic())

    def commit(self) -> Receipt:
        """Make all of it durable, in one piece; from then on everybody can read it. Again: the same receipt.

        Raises:
          NoMessages: it is empty. NoTransaction, TransactionTimedOut: it has ended before.
          TransactionOutcomeUnknown: nobody can know whether it took. Every other error: it did not; it is open again.
        """
        held = self._held
        if held.state == "committed":
            assert held.receipt is not None
            return held.receipt
        if held.state != "committing":
            request = held.committing(monotonic())
            try:
                self._sent = self._producer._hand_over(request, held.sequence_ids, None)
            except BaseException:
                held.state = "open"  # nothing was handed over
                raise
        return self._settle()

    def _settle(self) -> Receipt:
        assert self._sent is not None
        try:
            receipt = self._sent.result()
        except PlainsongError as error:
            self._held.failed(error, monotonic())
            raise
        self._held.committed(receipt)
        return receipt

    def abort(self) -> None:
        """Forget it; nothing was sent, and no sequence id is used up. Again: nothing. Raises NoTransaction: it is committed."""
        self._held.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._held.state == "committing":
            try:
                self._settle()
            except PlainsongError:
                if kind is None:
                    raise
        if self._held.state == "open":
            self._held.abort()
