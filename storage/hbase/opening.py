"""Before a store is opened: whether the gateways are what it needs, and if not, what they lack and how to mend it.

connect, greet         nobody listens, or not a framed gateway
a frame of two cells   larger than the gateway takes: it would fail once a commit is large
the tables             see ``tables.py``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from storage.base import StoreError, StoreUnusable
from storage.hbase.gateway import GREETED, GREETING, REFUSALS, Gateway
from storage.hbase.patience import BROKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.hbase.gateway import Address
    from storage.hbase.pool import Pool

#: How long a gateway may take to say a word.
_WORD_S = 3.0
#: As much again for a frame of some megabytes.
_FRAME_S = 15.0
_MIB = 1 << 20


async def examine(pool: Pool, addresses: Sequence[Address], *, max_cell_bytes: int) -> None:
    """See that a gateway answers, and that those which do are framed and take what the store sends.

    Waits for one as long as for any call, since HBase may be starting too.

    Raises:
      StoreUnusable: none answers, or one is not set up for this store.
    """
    patience = pool.patience("looking for a gateway")
    while True:
        absent: list[str] = []
        for address in addresses:
            try:
                await _examine(address, max_cell_bytes)
            except BROKEN as error:
                absent.append(f"{_named(address)}: {error or 'no answer'}")
        if len(absent) < len(addresses):
            return
        try:
            await patience.after(OSError("; ".join(absent)))
        except StoreError as error:
            raise StoreUnusable(
                f"no Thrift gateway of HBase answers: {'; '.join(absent)}",
                hint="start one, as hbase thrift start -f -p 9090, or correct storage.hbase.thrift",
            ) from error


async def _examine(address: Address, max_cell_bytes: int) -> None:
    """Raises StoreUnusable, or an OSError where nobody answers."""
    try:
        with trio.fail_after(_WORD_S):
            gateway = await Gateway.open(address)
    except (*BROKEN, trio.TooSlowError) as error:
        if await _is_unframed(address):
            raise StoreUnusable(
                f"the Thrift gateway at {_named(address)} is not framed",
                hint="start it with -f: hbase thrift start -f",
            ) from error
        raise OSError(str(error) or "no answer") from error
    try:
        with trio.fail_after(_FRAME_S):
            await _send_a_large_frame(gateway, max_cell_bytes)
    except (*BROKEN, trio.TooSlowError) as error:
        least = 2 * max_cell_bytes // _MIB + 1
        raise StoreUnusable(
            f"the Thrift gateway at {_named(address)} does not take frames of {least} MiB",
            hint=f"set its hbase.regionserver.thrift.framed.max_frame_size_in_mb to {least} or more, "
            "or lower storage.hbase.max_cell_bytes",
        ) from error
    finally:
        with trio.CancelScope(shield=True):
            await gateway.aclose()


async def _is_unframed(address: Address) -> bool:
    """Whether a gateway is there that speaks the same without frames. Raises OSError: nobody is there."""
    stream = await trio.open_tcp_stream(*address)
    async with stream:
        with trio.move_on_after(_WORD_S):
            await stream.send_all(GREETING)
            try:
                return bytes(await stream.receive_some(64)).startswith(GREETED)
            except BROKEN:
                return False
    return False


async def _send_a_large_frame(gateway: Gateway, max_cell_bytes: int) -> None:
    """A put into a row whose key no table can have: it is refused, if it was read at all.

    The largest frame of a store has the cell that it replaces and the one that it puts.
    """
    try:
        await gateway.call("mutateRow", b"plainsong", bytes(2 * max_cell_bytes), [], {})
    except REFUSALS:
        return


def _named(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
