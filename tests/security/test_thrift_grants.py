"""Tephra's clients know no names: with authentication their calls are those of ``thrift``, with its grants."""

from __future__ import annotations

import pytest
import trio
from thriftpy2.thrift import TApplicationException

from broker.assemble import start_thrift
from plainsong.protocol.transactions.transaction import Transaction
from tests.broker.test_tephra_clients import Tephra
from tests.security.named import GRANTS, named

TO_THRIFT = '[[grant]]\nto = ["thrift"]\nverbs = [{verbs}]\non = ["service"]\n'


@pytest.fixture
async def daemon(tmp_path, nursery):
    async with named(tmp_path, transactions__service="embedded", transactions__thrift="127.0.0.1:0") as running:
        stop = trio.Event()
        (address,) = await start_thrift(running.daemon.service, stop, nursery)
        running.tephra = await trio.to_thread.run_sync(Tephra, address)
        yield running
        running.tephra.client.close()
        stop.set()
        nursery.cancel_scope.cancel()


async def may(daemon, verbs):
    daemon.files.grant(GRANTS + (TO_THRIFT.format(verbs=verbs) if verbs else ""))
    await daemon.reload()


async def refused(daemon, verb, method, *args):
    with pytest.raises(TApplicationException, match=f"thrift has no {verb} on service"):
        await daemon.tephra.call(method, *args)


async def test_without_a_grant_nothing_is_answered(daemon):
    await may(daemon, "")
    await refused(daemon, "transact", "startShort")
    await refused(daemon, "transact", "getSnapshot")
    await refused(daemon, "operate", "resetState")


async def test_what_every_name_has_is_not_for_whoever_has_none(daemon):
    daemon.files.grant(GRANTS + TO_THRIFT.format(verbs='"all"').replace('"thrift"', '"*"'))
    await daemon.reload()
    assert (await daemon.ask("stranger", "POST", "/v1/transactions")).status_code == 200
    await refused(daemon, "transact", "startShort")


async def test_whoever_transacts_ends_what_no_name_began(daemon):
    theirs = (await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"]
    await may(daemon, '"transact"')
    mine = await daemon.tephra.call("startShort")
    await refused(daemon, "operate", "invalidateTx", theirs)
    await refused(daemon, "operate", "truncateInvalidTx", {theirs})
    assert isinstance(mine, Transaction)
    await daemon.tephra.call("abortTx", mine)


async def test_whoever_operates_ends_everybodys(daemon):
    theirs = (await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"]
    await may(daemon, '"operate"')
    assert await daemon.tephra.call("invalidateTx", theirs) is True
