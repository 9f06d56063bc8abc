"""Tephra's clients have no names: with authentication, their calls use the grants of ``thrift``."""

from __future__ import annotations

import json

import pytest
import trio
from thriftpy2.thrift import TApplicationException

from broker.http.reactor import open_reactor
from broker.listeners import start_thrift
from plainsong.protocol.transactions.transaction import Transaction
from tests.broker.test_tephra_clients import Tephra
from tests.patience import PATIENCE_S
from tests.security.named import GRANTS, named

TO_THRIFT = '[[grant]]\nto = ["thrift"]\nverbs = [{verbs}]\non = ["service"]\n'


@pytest.fixture
async def daemon(tmp_path):
    async with (
        named(tmp_path, transactions__service="embedded", transactions__thrift="127.0.0.1:0") as running,
        open_reactor(1000.0) as reactor,
        trio.open_nursery() as servers,
    ):
        stop = trio.Event()
        (address,) = await start_thrift(running.daemon.service, reactor, stop, servers)
        running.tephra = await trio.to_thread.run_sync(Tephra, address)
        yield running
        running.tephra.client.close()
        stop.set()


async def may(daemon, verbs):
    daemon.files.grant(GRANTS + (TO_THRIFT.format(verbs=verbs) if verbs else ""))
    await daemon.reload()


async def refused(daemon, verb, method, *args):
    with pytest.raises(TApplicationException, match=f"thrift lacks {verb} on service"):
        await daemon.tephra.call(method, *args)


async def test_without_a_grant_no_call_is_answered(daemon):
    await may(daemon, "")
    await refused(daemon, "transact", "startShort")
    await refused(daemon, "transact", "getSnapshot")
    await refused(daemon, "operate", "resetState")


async def test_grants_of_every_name_do_not_apply_without_a_name(daemon):
    daemon.files.grant(GRANTS + TO_THRIFT.format(verbs='"all"').replace('"thrift"', '"*"'))
    await daemon.reload()
    assert (await daemon.ask("stranger", "POST", "/v1/transactions")).status_code == 200
    await refused(daemon, "transact", "startShort")


async def test_the_verb_transact_ends_transactions_that_no_name_began(daemon):
    theirs = (await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"]
    await may(daemon, '"transact"')
    mine = await daemon.tephra.call("startShort")
    await refused(daemon, "operate", "invalidateTx", theirs)
    await refused(daemon, "operate", "truncateInvalidTx", {theirs})
    assert isinstance(mine, Transaction)
    await daemon.tephra.call("abortTx", mine)


async def test_the_verb_operate_ends_every_transaction(daemon):
    theirs = (await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"]
    await may(daemon, '"operate"')
    assert await daemon.tephra.call("invalidateTx", theirs) is True


async def audited(daemon):
    records = await daemon.ask("operator", "POST", "/v1/namespaces/system/topics/audit/poll", json={})
    return [json.loads(each["payload"]) for each in records.json()]


async def test_calls_on_transactions_of_others_are_recorded_as_thrift_and_everyday_calls_are_not(daemon, nursery):
    await daemon.daemon.service.audit.create()
    nursery.start_soon(daemon.daemon.service.audit.run)
    theirs = (await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"]
    await may(daemon, '"operate"')
    await daemon.tephra.call("abortTx", await daemon.tephra.call("startShort"))
    await daemon.tephra.call("invalidateTx", (await daemon.tephra.call("startShort")).transaction_id)
    assert [each["action"] for each in await audited(daemon) if each["action"] != "security.reload"] == []
    assert await daemon.tephra.call("invalidateTx", theirs) is True
    await daemon.tephra.call("truncateInvalidTx", {theirs})
    await daemon.tephra.call("resetState")
    found = [each for each in await audited(daemon) if each["action"] != "security.reload"]
    assert [(each["action"], each["target"], each["after"]["method"]) for each in found] == [
        ("transaction.invalidate", str(theirs), "invalidateTx"),
        ("transaction.truncate", "service", "truncateInvalidTx"),
        ("transaction.truncate", "service", "resetState"),
    ]
    assert {(each["name"], each["via"], each["outcome"]) for each in found} == {("thrift", "thrift", "applied")}
    assert found[0]["remote"].startswith("127.0.0.1:")


async def test_a_refused_call_is_recorded(daemon, nursery):
    await daemon.daemon.service.audit.create()
    nursery.start_soon(daemon.daemon.service.audit.run)
    await may(daemon, "")
    await refused(daemon, "transact", "startShort")
    with trio.fail_after(PATIENCE_S):
        while not (found := [each for each in await audited(daemon) if each["action"] == "security.refused"]):
            pass  # refusals are written a moment later
    assert (found[0]["name"], found[0]["code"], found[0]["target"]) == ("thrift", "forbidden", "service")


async def test_a_required_audit_covers_changes_over_thrift_too(tmp_path):
    more = {"transactions__service": "embedded", "transactions__thrift": "127.0.0.1:0", "security__audit": "required"}
    async with (
        named(tmp_path, **more) as running,
        open_reactor(1000.0) as reactor,
        trio.open_nursery() as servers,
    ):
        stop = trio.Event()
        (address,) = await start_thrift(running.daemon.service, reactor, stop, servers)
        running.tephra = await trio.to_thread.run_sync(Tephra, address)
        await may(running, '"operate"')
        with pytest.raises(TApplicationException, match="system:audit cannot be written"):
            await running.tephra.call("resetState")
        await running.daemon.service.audit.create()
        await running.tephra.call("resetState")
        running.tephra.client.close()
        stop.set()
