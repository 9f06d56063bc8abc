"""Tephra's clients and a daemon that is killed: no later snapshot shows what it forgot, and no conflict is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from plainsong.protocol.tephra.rpc import (
    TephraConflict,
    TephraNotInProgress,
    decode_reply,
    encode_call,
)
from plainsong.protocol.tephra.thrift import ThriftFrames, framed
from plainsong.protocol.transactions.ledger import TEPHRA_POINTERS
from plainsong.protocol.transactions.transaction import Transaction
from plainsong.protocol.transactions.view import Verdict, View
from tests.daemon.harness import Daemon
from tests.daemon.talk import JSON_HEADERS, ask, create, json_body, topic_path
from tests.patience import PATIENCE_S
from tests.ports import free_port


class Tephra:
    """A client of a daemon's Thrift listener, with one connection for each call."""

    def __init__(self) -> None:
        self.port = free_port()
        self.settings = f"transactions.thrift=127.0.0.1:{self.port}", "storage.min_free_bytes=0"

    def call(self, method: str, *args: Any) -> Any:
        """Return the answer. Raises TephraError."""
        return trio.run(self._call, method, *args)

    async def _call(self, method: str, *args: Any) -> Any:
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
                frames = ThriftFrames()
                await stream.send_all(framed(encode_call(method, 1, *args)))
                while (message := frames.take()) is None:
                    data = await stream.receive_some()
                    assert data, "the daemon closed the connection"
                    frames.feed(data)
                return decode_reply(message, method, 1)

    def start(self) -> Transaction:
        begun = self.call("startShortWithClientIdAndTimeOut", "killed", 3_000)  # longer than any restart takes
        assert isinstance(begun, Transaction)
        return begun

    def commit(self, transaction: Transaction, *keys: bytes) -> None:
        """Commit as Tephra's clients do. Raises TephraError."""
        self.call("canCommitOrThrow", transaction.transaction_id, keys)
        self.call("commitOrThrow", transaction.transaction_id, transaction.write_pointer)


@pytest.fixture
def tephra() -> Tephra:
    return Tephra()


def publish(daemon: Daemon, transaction: Transaction) -> None:
    body = json_body({"messages": ["one"], "transactionWritePointer": transaction.write_pointer})
    assert ask(daemon.address, "POST", topic_path("orders", "/publish"), body, JSON_HEADERS).status == 200


def test_whatever_a_killed_daemon_forgot_is_hidden_from_every_later_snapshot(
    daemon: Callable[..., Daemon], tephra: Tephra
):
    running = daemon(*tephra.settings)
    issued: list[int] = []
    for kills in (1, 2, 3):
        tephra.commit(tephra.start())
        begun = [tephra.start() for _ in range(3)]
        issued += [each.transaction_id for each in begun]
        running.kill()
        running.start()
        for _ in range(2):
            later = tephra.start()
            assert all(View.of(later).verdict(pointer) is not Verdict.DELIVER for pointer in issued)
            assert later.transaction_id > max(issued)
            tephra.commit(later)
        assert len(later.invalids) <= kills * TEPHRA_POINTERS
    lost = next((each for each in begun if each.transaction_id in later.invalids), None)
    if lost is not None:  # otherwise the daemon was slow, and had written them
        with pytest.raises(TephraNotInProgress):
            tephra.commit(lost)
        tephra.call("abortTx", lost)
        assert lost.transaction_id not in tephra.start().invalids


def test_a_commit_whose_change_set_a_killed_daemon_forgot_is_a_conflict(daemon: Callable[..., Daemon], tephra: Tephra):
    running = daemon(*tephra.settings)
    create(running.address, "orders")
    tephra.commit(tephra.start())
    transaction = tephra.start()
    publish(running, transaction)
    tephra.call("canCommitOrThrow", transaction.transaction_id, (b"key",))
    running.kill()
    running.start()
    with pytest.raises(TephraConflict) as refused:
        tephra.call("commitOrThrow", transaction.transaction_id, transaction.write_pointer)
    assert refused.value.args == (transaction.transaction_id,)
    assert tephra.call("commitTx", transaction) is False
    tephra.commit(transaction, b"key")


def test_a_stopped_daemon_forgets_no_begin_and_no_change_set(daemon: Callable[..., Daemon], tephra: Tephra):
    running = daemon(*tephra.settings)
    tephra.commit(tephra.start())
    transaction = tephra.start()
    tephra.call("canCommitOrThrow", transaction.transaction_id, (b"key",))
    running.stop()
    running.start()
    later = tephra.start()
    assert (later.in_progress, later.invalids) == ((transaction.transaction_id,), ())
    tephra.call("commitOrThrow", transaction.transaction_id, transaction.write_pointer)
    with pytest.raises(TephraConflict, match="key"):
        tephra.commit(later, b"key")
