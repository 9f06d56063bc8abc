"""Aborting many transactions, as a reset does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from protocol.errors import PlainsongError, TransactionNotFound, TransactionNotInProgress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

#: Aborts that are under way at the same time.
_AT_ONCE = 256


async def abort_all(abort: Callable[[int], Awaitable[object]], transaction_ids: Iterable[int]) -> None:
    """Abort these; one that was decided or forgotten meanwhile is no failure. Raises the first error of another kind."""
    failures: list[PlainsongError] = []
    limit = trio.CapacityLimiter(_AT_ONCE)

    async def one(transaction_id: int) -> None:
        async with limit:
            try:
                await abort(transaction_id)
            except (TransactionNotFound, TransactionNotInProgress):
                pass
            except PlainsongError as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        for transaction_id in transaction_ids:
            nursery.start_soon(one, transaction_id)
    if failures:
        raise failures[0]
