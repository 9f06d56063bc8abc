"""With which eyes a request reads: everything, the snapshot it brought, or what is committed as of now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidParameter, RequestTooLarge
from protocol.transactions.codec import decode_transaction
from protocol.transactions.view import View

if TYPE_CHECKING:
    from broker.service import Service
    from protocol.requests import Isolation

#: A snapshot of two million pointers: what a Tephra could send its own clients.
MAX_SNAPSHOT_BYTES = 16 << 20


async def fresh_for(service: Service, isolation: Isolation | None, transaction: bytes | None = None) -> None:
    """Before ``view_for``: whatever was committed before the request came is in the view of one who asks for it.

    Raises:
      TransactionsUnavailable: as ``view_for``.
    """
    if isolation == "committed" and transaction is None:
        await service.transactions.fresh()


def view_for(service: Service, isolation: Isolation | None, transaction: bytes | None) -> View | None:
    """What the reader may see; None: everything, undecided and rolled back.

    A committed reader's view has to be taken *before* its span: then of a transaction that it shows nothing can stand
    behind the span's end. One from ``transaction`` bytes may be made at any time.

    Raises:
      InvalidParameter: both are given.
      RequestTooLarge: the transaction has more than ``MAX_SNAPSHOT_BYTES``.
      MalformedTransaction: the bytes are no transaction's.
      TransactionsUnavailable: isolation is ``committed``, and there is no transaction service, or it is down.
    """
    if transaction is not None and isolation is not None:
        raise InvalidParameter(
            "transaction and isolation exclude each other",
            hint="transaction brings a snapshot, isolation=committed takes the daemon's own",
        )
    if transaction is not None:
        if len(transaction) > MAX_SNAPSHOT_BYTES:
            raise RequestTooLarge(f"a transaction of {len(transaction)} bytes", hint=f"at most {MAX_SNAPSHOT_BYTES}")
        return View.of(decode_transaction(transaction))
    return service.transactions.view() if isolation == "committed" else None
