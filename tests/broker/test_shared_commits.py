"""Requests over HTTP and calls of Tephra's clients that arrive together are made durable together."""

import fcntl
import socket
import struct
import termios
from dataclasses import replace
from functools import partial

import trio
from broker_in_process import TOPICS, in_process

from broker.config.config import config_of
from broker.http.budgets import BodyBudget
from broker.thrift import TephraMethods, serve_thrift
from plainsong.protocol.tephra.rpc import decode_reply, encode_call
from plainsong.protocol.tephra.thrift import framed
from storage.leveldb import LevelDBOptions, LevelDBStore

BODY = b'{"messages": ["m"]}'
PUBLISH = (
    f"POST {TOPICS}/t/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY
BEGIN = framed(encode_call("startShortClientId", 1, "c"))


def connected(address):
    host, port = address.removeprefix("http://").rsplit(":", 1)
    sock = socket.create_connection((host, int(port)))
    sock.setblocking(False)
    return sock


def send(sock, data):
    """Send, and return once the server's kernel has the bytes, without running the event loop until then."""
    sock.send(data)
    while struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]:
        pass


async def received(sock):
    await trio.lowlevel.wait_readable(sock)
    return sock.recv(1 << 16)


async def test_a_publish_and_a_call_of_tephras_client_that_arrive_together_share_one_commit(tmp_path, nursery):
    options = LevelDBOptions()
    always_inline = replace(options, settings=replace(options.settings, inline_commit_s=60.0))
    async with (
        await LevelDBStore.open(tmp_path / "data", always_inline) as store,
        in_process(store=store, listener="hot") as daemon,
    ):
        await daemon.create()
        serving = partial(
            serve_thrift,
            "127.0.0.1:0",
            TephraMethods(daemon.service.authority.own),
            budget=BodyBudget(1 << 20),
            stop=trio.Event(),
            grace_s=1,
            settings=config_of({}).http,
            reactor=daemon.reactor,
        )
        (address,) = await nursery.start(serving)
        publisher, tephra = connected(str(daemon.http.base_url)), connected(address)
        send(publisher, PUBLISH)
        await received(publisher)
        send(tephra, BEGIN)
        begun = decode_reply((await received(tephra))[4:], "startShortClientId", 1).transaction_id
        clients = {publisher: PUBLISH, tephra: framed(encode_call("commitOrThrow", 2, begun, begun))}
        groups, write = [], store._group_commit._write

        def counted(group, while_syncing=None):
            groups.append(len(group))
            write(group, while_syncing)

        store._group_commit._write = counted
        for sock, request in clients.items():
            send(sock, request)
        answers = [await received(sock) for sock in clients]
        assert answers[0].startswith(b"HTTP/1.1 200 ")
        assert decode_reply(answers[1][4:], "commitOrThrow", 2) is None
        assert groups == [2]
        for sock in clients:
            sock.close()
        nursery.cancel_scope.cancel()
