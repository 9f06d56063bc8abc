"""Opening a store in HBase: checks the gateways, and checks or creates the three tables.

An error says what is missing and how to correct it.

    connect, greet         detects an address without a listener, or with an unframed gateway
    a frame of two cells   detects a frame limit of the gateway that a large commit would exceed later
    the tables             ``Tables.prepare``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from storage.base import StoreError, StoreUnusable
from storage.hbase.gateway import GREETED, GREETING, REFUSALS, Gateway, TrioConnection, connect, refusal_text, thrift
from storage.hbase.pool import BROKEN_CONNECTION, GatewayRefused
from storage.hbase.scan import ScanRange, first_rows

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from storage.hbase.gateway import Address
    from storage.hbase.pool import Pool

#: Time limit for a gateway's answer to a greeting.
_WORD_S = 3.0
#: Time limit for its answer to a frame of a few megabytes.
_FRAME_S = 15.0
_MIB = 1 << 20


async def check_gateways(pool: Pool, addresses: Sequence[Address], *, max_cell_bytes: int) -> None:
    """Check that a gateway answers, and that all that answer are framed and accept the store's largest frame.

    Waits for a gateway as long as for any call, since HBase may be starting too.

    Raises:
      StoreUnusable: no gateway answers, or one is not configured for the store.
    """
    retry = pool.retry_deadline("looking for a gateway")
    while True:
        absent: list[str] = []
        for address in addresses:
            try:
                await _check_gateway(address, pool.tls, max_cell_bytes)
            except BROKEN_CONNECTION as error:
                absent.append(f"{_named(address)}: {error or 'no answer'}")
        if len(absent) < len(addresses):
            return
        try:
            await retry.pause(OSError("; ".join(absent)))
        except StoreError as error:
            raise StoreUnusable(
                f"no Thrift gateway of HBase answers: {'; '.join(absent)}",
                hint="start one, for example with hbase thrift start -f -p 9090, or correct storage.hbase.thrift",
            ) from error


async def _check_gateway(address: Address, tls: Callable[[], ssl.SSLContext] | None, max_cell_bytes: int) -> None:
    """Check one gateway. Raises StoreUnusable, or an OSError if it does not answer."""
    try:
        with trio.fail_after(_WORD_S):
            gateway = await Gateway.open(address, tls)
    except (*BROKEN_CONNECTION, trio.TooSlowError) as error:
        if await _is_unframed(address, tls):
            raise StoreUnusable(
                f"the Thrift gateway at {_named(address)} is not framed",
                hint="start it with -f: hbase thrift start -f",
            ) from error
        raise OSError(str(error) or "no answer") from error
    least = 2 * max_cell_bytes // _MIB + 1
    try:
        with trio.fail_after(_FRAME_S):
            await _send_a_large_frame(gateway, max_cell_bytes)
    except trio.TooSlowError as error:
        raise OSError(f"no answer to a frame of {least} MiB within {_FRAME_S:g} s") from error
    except BROKEN_CONNECTION as error:
        await _is_there(address, tls)
        raise StoreUnusable(
            f"the Thrift gateway at {_named(address)} does not accept frames of {least} MiB",
            hint=f"set its hbase.regionserver.thrift.framed.max_frame_size_in_mb to {least} or more, "
            "or lower storage.hbase.max_cell_bytes",
        ) from error
    finally:
        with trio.CancelScope(shield=True):
            await gateway.aclose()


async def _is_there(address: Address, tls: Callable[[], ssl.SSLContext] | None) -> None:
    """Check that a gateway still answers after it closed a connection. Raises OSError: it has ended."""
    try:
        with trio.fail_after(_WORD_S):
            again = await Gateway.open(address, tls)
    except (*BROKEN_CONNECTION, trio.TooSlowError) as error:
        raise OSError(str(error) or "it has ended") from error
    await again.aclose()


async def _is_unframed(address: Address, tls: Callable[[], ssl.SSLContext] | None) -> bool:
    """True if an unframed gateway listens there. Raises OSError: nothing listens."""
    stream = await connect(address, tls)
    async with stream:
        with trio.move_on_after(_WORD_S):
            await stream.send_all(GREETING)
            try:
                return bytes(await stream.receive_some(64)).startswith(GREETED)
            except BROKEN_CONNECTION:
                return False
    return False


async def _send_a_large_frame(gateway: Gateway, max_cell_bytes: int) -> None:
    """Send a put with a row key that no table can have: a gateway that accepts the frame refuses the put.

    The largest frame of a store has the cell that it replaces and the one that it puts.
    """
    try:
        await gateway.call("mutateRow", b"plainsong", bytes(2 * max_cell_bytes), [], {})
    except REFUSALS:
        return


def _named(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


# --- tables ----------------------------------------------------------------------------------------


NAMES = {Table.METADATA: "metadata", Table.MESSAGE: "messages", Table.PAYLOAD: "payloads"}
#: One version, since rows are written once; a filter and a cache for reads by key.
FAMILY_OPTIONS = {"max_versions": 1, "bloom_filter_type": "ROW", "block_cache_enabled": True}

#: Time limit for creating a table: a busy master takes seconds.
_CREATE_S = 60.0
#: The pause between two checks of whether a table is enabled.
_ENABLED_AGAIN_S = 0.2


class NoTables(StoreUnusable):
    """None of the three tables exists, and they may not be created."""


class Tables:
    """The names of a store's tables."""

    def __init__(self, prefix: str) -> None:
        self._names = {table: (prefix + name).encode("ascii") for table, name in NAMES.items()}

    def __getitem__(self, table: Table) -> bytes:
        return self._names[table]

    async def prepare(self, pool: Pool, *, create: bool) -> None:
        """Check that the tables exist, and create missing ones.

        Raises:
          NoTables: none exists, and none may be created.
          StoreUnusable: one is missing and may not be created, or was lost.
          StoreError: no gateway answers.
        """
        there = set(await self._there(pool))
        here = [name for name in self._names.values() if name in there]
        missing = [name for name in self._names.values() if name not in there]
        await _wait_until_enabled(pool, here)
        if missing and not create:
            kind = StoreUnusable if here else NoTables
            raise kind(f"HBase has no table {missing[0].decode()}", hint=_hint(there))
        if missing:
            await self._refuse_lost(pool, here)
        for name in missing:
            await self._create(pool, name)
        await _wait_until_enabled(pool, missing)

    async def _refuse_lost(self, pool: Pool, here: Sequence[bytes]) -> None:
        """Raise StoreUnusable for a lost table: creating it again would hide the loss."""
        used = [name for name in here if await first_rows(pool, ScanRange(name, b"", b""), 1, timeout_s=pool.timeout_s)]
        # List again: another instance that starts writes rows only once it has created all tables.
        if used and (lost := set(self._names.values()) - set(await self._there(pool))):
            raise StoreUnusable(
                f"HBase has rows in table {used[0].decode()}, but no table {min(lost).decode()}",
                hint="the table was lost, and messages with it: look for a snapshot; hbase shell -n "
                "etc/hbase/tables.rb creates an empty table",
            )

    async def _there(self, pool: Pool) -> list[bytes]:
        try:
            return list(await pool.call("getTableNames"))
        except GatewayRefused as error:
            raise StoreUnusable(
                f"the gateway cannot list the tables: {error.detail}",
                hint="start HBase's Thrift 1 gateway, hbase thrift start -f, not thrift2",
            ) from error

    async def _create(self, pool: Pool, name: bytes) -> None:
        try:
            with trio.fail_after(_CREATE_S):
                async with pool.connection() as gateway:
                    await _create_through(gateway, name)
        except (*BROKEN_CONNECTION, trio.TooSlowError) as error:
            why = str(error) or "no answer in time"
            raise StoreUnusable(f"HBase did not create table {name.decode()}: {why}", hint="start again") from error


async def _wait_until_enabled(pool: Pool, names: Sequence[bytes]) -> None:
    """Wait until all tables are enabled, which takes a few seconds while another instance or a script creates one.

    The gateway does not distinguish a table that is being enabled from one that was disabled on purpose, so the latter
    is only refused after the store's timeout.

    Raises:
      StoreUnusable: one is still disabled.
    """
    deadline_s = trio.current_time() + pool.timeout_s
    for name in names:
        while not await pool.call("isTableEnabled", name):
            if trio.current_time() >= deadline_s:
                raise StoreUnusable(f"HBase's table {name.decode()} is disabled", hint="enable it in hbase shell")
            await trio.sleep(_ENABLED_AGAIN_S)


async def _create_through(gateway: Gateway, name: bytes) -> None:
    try:
        await TrioConnection.on(gateway).create_table(name, {"d": FAMILY_OPTIONS})
    except thrift.AlreadyExists:
        return  # another instance has just created it
    except REFUSALS as error:
        if "TableExistsException" in refusal_text(error):
            return  # the same error in another form
        raise StoreUnusable(
            f"HBase did not create table {name.decode()}: {refusal_text(error)}",
            hint="create it by hand: hbase shell -n etc/hbase/tables.rb",
        ) from error


def _hint(there: set[bytes]) -> str:
    """Return the hint for a missing table, with the prefixes of other stores if there are any."""
    ending = NAMES[Table.METADATA].encode()
    prefixes = sorted(name[: -len(ending)].decode() for name in there if name.endswith(ending))
    others = f"; there are tables with storage.hbase.table_prefix {', '.join(map(repr, prefixes))}" if prefixes else ""
    return f"create it: hbase shell -n etc/hbase/tables.rb{others}"
