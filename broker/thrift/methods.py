"""Tephra's methods, carried out by the daemon's own transaction service, with Tephra's words for what goes wrong."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from protocol.errors import (
    InvalidParameter,
    PlainsongError,
    TransactionConflict,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionsUnavailable,
    TransactionTooLarge,
)
from protocol.transactions.manager.answers import ChangeConflict
from protocol.transactions.tephra_idl import (
    ILLEGAL_ARGUMENT,
    TOO_LARGE,
    Conflict,
    CouldNotTakeSnapshot,
    Declared,
    Generic,
    InvalidTruncateTime,
    NotInProgress,
)
from protocol.transactions.tephra_rpc import (
    INTERNAL_ERROR,
    RefusedCall,
    decode_call,
    encode_error,
    encode_failure,
    encode_result,
)
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from actors.transactions import TransactionService
    from protocol.transactions.tephra_rpc import Call
    from protocol.transactions.transaction import Transaction

log = logging.getLogger("plainsong.thrift")

_UNKNOWN_CLIENT = "unknown"


class TephraMethods:
    """Answers messages; stateless, so all connections share one."""

    def __init__(self, service: TransactionService) -> None:
        self._service = service
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "startLong": self._start_long,
            "startLongClientId": self._start_long_for,
            "startShort": self._start_short,
            "startShortClientId": self._start_short_for,
            "startShortTimeout": self._start_short_within,
            "startShortWithTimeout": self._start_short_within,
            "startShortWithClientIdAndTimeOut": self._start_short_for,
            "canCommitTx": self._can_commit,
            "canCommitOrThrow": self._service.prepare,
            "commitTx": self._commit_whole,
            "commitOrThrow": self._commit,
            "abortTx": self._abort,
            "invalidateTx": self._invalidate,
            "checkpoint": self._checkpoint,
            "getSnapshot": self._snapshot,
            "resetState": self._service.reset,
            "status": self._status,
            "invalidTxSize": self._invalid_size,
            "truncateInvalidTx": self._truncate,
            "truncateInvalidTxBefore": self._truncate_before,
            "pruneNow": self._prune_now,
        }

    async def answer(self, message: bytes) -> bytes:
        """The message that answers a message.

        Raises:
          MalformedThrift: it is no call; there is nobody to answer.
        """
        try:
            call = decode_call(message)
        except RefusedCall as refused:
            return encode_failure(refused.call, refused.number, refused.message)
        try:
            return encode_result(call, await self._methods[call.method](*call.args))
        except Declared as error:
            return encode_error(call, error)
        except PlainsongError as error:
            declared = _in_tephras_words(error)
            return encode_error(call, declared) if declared else failure(call, error.detail)
        except Exception:
            log.exception("a method failed", extra={"method": call.method})
            return failure(call, "the log says more")

    # --- beginning --------------------------------------------------------------------------------

    async def _start_long(self) -> Transaction:
        return await self._start_long_for(_UNKNOWN_CLIENT)

    async def _start_long_for(self, client_id: str | None) -> Transaction:
        return (await self._service.begin(TransactionType.LONG, None, _named(client_id))).transaction

    async def _start_short(self) -> Transaction:
        return await self._start_short_for(_UNKNOWN_CLIENT)

    async def _start_short_within(self, timeout_s: int) -> Transaction:
        return await self._start_short_for(_UNKNOWN_CLIENT, timeout_s)

    async def _start_short_for(self, client_id: str | None, timeout_s: int | None = None) -> Transaction:
        return (await self._service.begin(TransactionType.SHORT, timeout_s, _named(client_id))).transaction

    # --- deciding ---------------------------------------------------------------------------------

    async def _can_commit(self, transaction: Transaction, changes: Sequence[bytes]) -> bool:
        try:
            await self._service.prepare(transaction.transaction_id, changes)
        except (TransactionConflict, TransactionTooLarge):
            return False
        return True

    async def _commit_whole(self, transaction: Transaction) -> bool:
        try:
            await self._service.commit(transaction.transaction_id)
        except TransactionConflict:
            return False
        return True

    async def _commit(self, transaction_id: int, write_pointer: int) -> None:
        del write_pointer  # the service knows better: a wrong one would move everybody's read pointer
        await self._service.commit(transaction_id)

    async def _abort(self, transaction: Transaction) -> None:
        try:
            await self._service.abort(transaction.transaction_id)
        except TransactionNotFound:
            return  # as Tephra answers it

    async def _invalidate(self, transaction_id: int) -> bool:
        try:
            return (await self._service.invalidate(transaction_id)).changed
        except (TransactionNotFound, TransactionNotInProgress):
            return False

    async def _checkpoint(self, transaction: Transaction) -> Transaction:
        return (await self._service.checkpoint(transaction.transaction_id, transaction)).transaction

    # --- looking after it -------------------------------------------------------------------------

    async def _snapshot(self) -> bytes:
        try:
            return self._service.snapshot()
        except TransactionsUnavailable as error:
            raise CouldNotTakeSnapshot(error.detail) from None

    async def _status(self) -> str:
        try:
            self._service.figures()
        except TransactionsUnavailable:
            return "NOTOK"
        return "OK"

    async def _invalid_size(self) -> int:
        return self._service.figures().invalid

    async def _truncate(self, pointers: Sequence[int]) -> bool:
        return await self._service.truncate(pointers) > 0

    async def _truncate_before(self, before_ms: int) -> bool:
        try:
            return await self._service.truncate_before(before_ms) > 0
        except InvalidParameter as error:
            raise InvalidTruncateTime(error.detail) from None

    async def _prune_now(self) -> None:
        """Nothing, as a Tephra whose pruning is off: while there are Tephra's clients, other stores rely on the list."""


def _named(client_id: str | None) -> str:
    if client_id is None:
        raise Generic("a client id is due", ILLEGAL_ARGUMENT)
    return client_id


def _in_tephras_words(error: PlainsongError) -> Declared | None:
    if isinstance(error, ChangeConflict):
        return Conflict(error.transaction_id, error.key, error.client_id)
    if isinstance(error, TransactionNotFound | TransactionNotInProgress):
        return NotInProgress(error.detail)
    if isinstance(error, TransactionTooLarge):
        return Generic(error.detail, TOO_LARGE)
    if isinstance(error, InvalidParameter):
        return Generic(error.detail, ILLEGAL_ARGUMENT)
    return None


def failure(call: Call, why: str) -> bytes:
    """The message that says that a call could not be carried out."""
    return encode_failure(call, INTERNAL_ERROR, f"Internal error processing {call.method}: {why}")
