"""A lightweight transaction in the hands of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from typing import Self

    from plainsong.aio.producer import AsyncProducer
    from plainsong.aio.sent import AsyncProducedWhole
    from plainsong.core.producing.lightweight import Lightweight, LightweightState
    from plainsong.messages import Receipt


class AsyncLightweightTransaction:
    """Messages of one routing key that go in together or not at all; made by ``AsyncProducer.begin``.

    They stay here until ``commit``, which is one publish. In an ``async with`` block what was not committed is aborted at its
    end, and what is being committed is waited for. For one task at a time.
    """

    def __init__(self, producer: AsyncProducer, held: Lightweight) -> None:
        self._producer = producer
        self._held = held
        self._sent: AsyncProducedWhole | None = None

    def __repr__(self) -> str:
        return f"<AsyncLightweightTransaction of {self.routing_key!r}, {self.state}>"

    @property
    def routing_key(self) -> str:
        """What its messages belong to."""
        return self._held.routing_key

    @property
    def state(self) -> LightweightState:
        """``open``, ``committing``, ``committed``, ``aborted``; ``unknown`` when nobody can know whether it took."""
        self._held.expire(anyio.current_time())
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
        self._held.write(message, sequence_id=sequence_id, ttl_s=ttl_s, now_s=anyio.current_time())

    async def commit(self) -> Receipt:
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
            request = held.committing(anyio.current_time())
            try:
                self._sent = await self._producer._hand_over(request, held.sequence_ids, None)
            except BaseException:
                held.state = "open"  # nothing was handed over
                raise
        return await self._settle()

    async def _settle(self) -> Receipt:
        assert self._sent is not None
        try:
            receipt = await self._sent
        except PlainsongError as error:
            self._held.failed(error, anyio.current_time())
            raise
        self._held.committed(receipt)
        return receipt

    def abort(self) -> None:
        """Forget it; nothing was sent, and no sequence id is used up. Again: nothing. Raises NoTransaction: it is committed."""
        self._held.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._held.state == "committing":
            try:
                with anyio.CancelScope(shield=True):
                    await self._settle()
            except PlainsongError:
                if kind is None:
                    raise
        if self._held.state == "open":
            self._held.abort()
