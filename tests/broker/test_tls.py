"""Both listeners behave under TLS as they do without it."""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
import warnings
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import httpx
import pytest
import trio
import trio.testing

from broker.config.config import config_of
from broker.http.server import STALLED_S
from broker.http.tls_socket import TlsSocket, TlsStream
from broker.security.guard import Guard
from broker.security.peer import Peer
from broker.tls import load
from tests.broker.listeners import Listener, Reader, Secured, post, running
from tests.certificates import Authority
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


def secured(authority: Authority, **settings: str) -> Secured:
    """Return TLS as the daemon would load it with these settings of ``tls``."""
    pair = authority.issue("server", "queue.example")
    given = {"certificate": str(pair.certificate), "key": str(pair.key), **settings}
    config = config_of({f"tls.{name}": value for name, value in given.items()}).tls
    return Secured(load(config, time.time()).server)


@asynccontextmanager
async def connected(
    listener: Listener, context: ssl.SSLContext, *alpn: str
) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    if alpn:
        context.set_alpn_protocols(alpn)
    stream = trio.SSLStream(await listener.connect(), context, server_hostname="127.0.0.1", https_compatible=True)
    try:
        await stream.do_handshake()
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


@BOTH_WAYS
async def test_requests_are_answered_one_after_the_other_and_when_they_arrive_together(authority, hot):
    async with (
        running(hot=hot, tls=secured(authority)) as listener,
        connected(listener, authority.trusting()) as stream,
    ):
        reader = Reader(stream)
        for number in range(20):
            await stream.send_all(post("t/store", b"%d" % number))
            assert json.loads((await reader.reply()).body)["body"] == (b"%d" % number).hex()
        await stream.send_all(b"".join(post("t/store", b"%d" % number) for number in range(300)))
        for number in range(300):
            assert json.loads((await reader.reply()).body)["body"] == (b"%d" % number).hex()
        assert {peer.tls for peer in listener.toys.peers} == {True}
        assert listener.toys.built == (0 if hot else 1)


@BOTH_WAYS
@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 65_535, 65_536, 131_072, 262_145, 1 << 20])
async def test_bodies_of_any_size_are_received_and_sent_in_full(authority, hot, size):
    body = random.Random(size).randbytes(size)
    async with (
        running(hot=hot, tls=secured(authority)) as listener,
        connected(listener, authority.trusting()) as stream,
    ):
        reader = Reader(stream)
        for _ in range(2):
            await stream.send_all(post("t/store", body))
            assert json.loads((await reader.reply()).body)["body"] == body.hex()


@BOTH_WAYS
async def test_a_chunked_body_and_a_chunked_answer_pass(authority, hot):
    async with (
        running(hot=hot, tls=secured(authority)) as listener,
        connected(listener, authority.trusting()) as stream,
    ):
        reader = Reader(stream)
        await stream.send_all(post("t/store", b"", "Transfer-Encoding: chunked"))
        for _ in range(50):
            await stream.send_all(b"3\r\nabc\r\n")
        await stream.send_all(b"0\r\n\r\n")
        assert json.loads((await reader.reply()).body)["body"] == (b"abc" * 50).hex()
        await stream.send_all(post("t/rollback"))
        assert (await reader.reply()).body == b"0;1;2;"


async def test_records_may_arrive_in_any_pieces(authority):
    """A client may send its TLS records a byte at a time, or split anywhere."""
    rng = random.Random(7)
    async with running(tls=secured(authority)) as listener:
        for largest in (1, 3, 50, 2000):
            async with await listener.connect() as raw:
                incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                tls = authority.trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")

                async def trickle(largest=largest, raw=raw, outgoing=outgoing) -> None:
                    rest = outgoing.read()
                    while rest:
                        size = rng.randint(1, largest)
                        await raw.send_all(rest[:size])
                        rest = rest[size:]

                async def until(call, incoming=incoming, raw=raw, trickle=trickle):
                    while True:
                        try:
                            return call()
                        except ssl.SSLWantReadError:
                            await trickle()
                            with trio.fail_after(PATIENCE_S):
                                incoming.write(await raw.receive_some())

                await until(tls.do_handshake)
                await trickle()
                for size in (0, 5, 3000):
                    body = rng.randbytes(size)
                    tls.write(post("t/store", body))
                    await trickle()
                    answer = b""
                    while body.hex().encode() not in answer or b"}" not in answer:
                        answer += await until(lambda tls=tls: tls.read(1 << 20))


@BOTH_WAYS
async def test_a_request_may_arrive_with_the_end_of_the_handshake(authority, hot):
    async with running(hot=hot, tls=secured(authority)) as listener, await listener.connect() as raw:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = authority.trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await raw.send_all(outgoing.read())
                incoming.write(await raw.receive_some())
        tls.write(post("t/store", b"at once"))
        await raw.send_all(outgoing.read())
        answer = b""
        with trio.fail_after(PATIENCE_S):
            while b"at once".hex().encode() not in answer:
                incoming.write(await raw.receive_some())
                with suppress(ssl.SSLWantReadError):
                    answer += tls.read(1 << 16)


async def test_a_reader_that_stops_for_a_while_gets_every_byte_in_order(authority):
    async with (
        running(tls=secured(authority)) as listener,
        connected(listener, authority.trusting()) as stream,
    ):
        await stream.send_all(post("endless/rollback"))
        await trio.testing.wait_all_tasks_blocked(0.05)  # the sockets are full
        reader = Reader(stream)
        await reader._until(b"\r\n\r\n")
        for number in range(300):
            size = int(await reader._until(b"\r\n"), 16)
            assert await reader._exactly(size) == b"%d;" % number * 20_000
            await reader._exactly(2)


@BOTH_WAYS
async def test_a_connection_is_handed_over_with_its_tls_state(authority, hot):
    async with (
        running(hot=hot, tls=secured(authority)) as listener,
        connected(listener, authority.trusting()) as stream,
    ):
        reader = Reader(stream)
        hot, cold = post("t/store", b"x"), b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await stream.send_all(hot + hot + cold + hot + cold)
        assert [(await reader.reply()).status for _ in range(5)] == [200] * 5
        await stream.send_all(post("t/store", b"y" * 200_000))
        assert json.loads((await reader.reply()).body)["body"] == (b"y" * 200_000).hex()


async def test_a_connection_returns_to_the_hot_path_with_its_tls_state(authority):
    async with running(tls=secured(authority)) as listener, connected(listener, authority.trusting()) as stream:
        reader = Reader(stream)
        for request in (b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n", post("t/store", b"y" * 200_000)) * 3:
            await stream.send_all(request)
            assert (await reader.reply()).status == 200
        assert listener.toys.by_application == 0


async def test_http_2_is_negotiated_and_http_1_1_is_the_default(authority):
    async with running(tls=secured(authority)) as listener:
        base = f"https://127.0.0.1:{listener.port}/v1/namespaces/ns/topics/t/store"
        for http2, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
            async with httpx.AsyncClient(
                verify=authority.trusting(), http2=http2, trust_env=False, timeout=PATIENCE_S
            ) as client:
                answer = await client.post(base, content=b"hello" * 50_000)
                assert (answer.http_version, answer.status_code) == (version, 200)
                assert bytes.fromhex(answer.json()["body"]) == b"hello" * 50_000
        async with connected(listener, authority.trusting()) as stream:
            assert stream.selected_alpn_protocol() is None
            await stream.send_all(post("t/store", b"x"))
            assert (await Reader(stream).reply()).status == 200
        async with connected(listener, authority.trusting(), "spdy/1") as stream:
            await stream.send_all(post("t/store", b"x"))
            assert (await Reader(stream).reply()).status == 200


@BOTH_WAYS
async def test_the_end_of_a_connection_is_announced_in_tls_too(authority, hot):
    async with running(hot=hot, tls=secured(authority)) as listener:
        context = authority.trusting()
        raw = await listener.connect()
        # Not https_compatible: a connection closed without a close_notify would raise.
        stream = trio.SSLStream(raw, context, server_hostname="127.0.0.1")
        await stream.send_all(post("t/store", b"x", "Connection: close"))
        reader = Reader(stream)
        assert (await reader.reply()).status == 200
        assert await stream.receive_some() == b""
        await stream.aclose()


async def test_the_end_of_an_idle_connection_is_announced_in_tls_too(authority):
    async with running(tls=secured(authority), keep_alive_s=0.2) as listener:
        context = authority.trusting()
        stream = trio.SSLStream(await listener.connect(), context, server_hostname="127.0.0.1")
        with trio.fail_after(PATIENCE_S):
            await stream.do_handshake()
            assert await stream.receive_some() == b""
        await stream.aclose()


async def test_a_client_that_half_closes_gets_its_answers(authority):
    async with running(tls=secured(authority)) as listener, await listener.connect() as raw:
        stream = TlsStream(TlsSocket(raw.socket._sock, authority.trusting(), connected_to="127.0.0.1"))
        await stream.tls.shake_hands()
        await stream.send_all(post("t/store", b"a") + post("t/store", b"b"))
        await stream.send_eof()
        reader = Reader(stream)
        assert [(await reader.reply()).status for _ in range(2)] == [200, 200]
        assert await reader.at_end()


@BOTH_WAYS
async def test_plain_http_gets_an_answer_that_the_port_speaks_tls(authority, hot):
    tls = secured(authority)
    async with running(hot=hot, tls=tls) as listener:
        for request in (post("t/store", b"x"), b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            async with await listener.connect() as stream:
                await stream.send_all(request)
                reader = Reader(stream)
                reply = await reader.reply()
                assert (reply.status, reply.code) == (400, "tls_required")
                assert await reader.at_end()
        assert await tls.counted(3) == ["plain"] * 3
        assert listener.toys.peers == []


async def test_bytes_that_are_neither_tls_nor_http_end_the_connection(authority):
    tls = secured(authority)
    async with running(tls=tls) as listener:
        for noise in (b"\x00\x01\x02", b"\xff" * 100, b"\x16\x03\x01\x00\x05nonsense" * 9):
            async with await listener.connect() as stream:
                await stream.send_all(noise)
                with trio.fail_after(PATIENCE_S):
                    try:
                        while await stream.receive_some():
                            pass
                    except trio.BrokenResourceError:
                        pass
        assert sorted(await tls.counted(3)) == ["failed", "plain", "plain"]


@pytest.mark.parametrize(
    ("settings", "version", "works"),
    [
        ({}, ssl.TLSVersion.TLSv1_2, True),
        ({}, ssl.TLSVersion.TLSv1_3, True),
        ({}, ssl.TLSVersion.TLSv1_1, False),
        ({"minimum": "1.3"}, ssl.TLSVersion.TLSv1_2, False),
        ({"minimum": "1.3"}, ssl.TLSVersion.TLSv1_3, True),
    ],
)
async def test_the_setting_limits_the_oldest_tls_version(authority, settings, version, works):
    context = authority.trusting()
    if version == ssl.TLSVersion.TLSv1_1:
        context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the old version is deliberate
        context.minimum_version = context.maximum_version = version
    async with running(tls=secured(authority, **settings)) as listener:
        if works:
            async with connected(listener, context) as stream:
                await stream.send_all(post("t/store", b"x"))
                assert (await Reader(stream).reply()).status == 200
        else:
            with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
                async with connected(listener, context):
                    pass


@pytest.mark.parametrize("cipher", ["AES128-SHA", "ECDHE-ECDSA-AES128-SHA", "AES128-GCM-SHA256"])
async def test_ciphers_without_forward_secrecy_or_authentication_are_not_offered(authority, cipher):
    context = authority.trusting()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(cipher)
    async with running(tls=secured(authority)) as listener:
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
            async with connected(listener, context):
                pass


# --- client certificates ---------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("demand", ["optional", "required"])
async def test_every_request_of_a_connection_carries_its_verified_certificate(authority, hot, demand):
    mine = authority.issue("client", "ledger.internal")
    tls = secured(authority, client_ca=str(authority.file), client_certificates=demand)
    async with running(hot=hot, tls=tls) as listener:
        async with connected(listener, authority.trusting(mine)) as stream:
            reader = Reader(stream)
            for _ in range(2):
                await stream.send_all(post("t/store", b"x"))
                assert (await reader.reply()).status == 200
        shown = ssl.PEM_cert_to_DER_cert(
            mine.certificate.read_text().partition("-----END")[0] + "-----END CERTIFICATE-----\n"
        )
        assert [peer.certificate for peer in listener.toys.peers] == [shown] * 2
        assert all(isinstance(peer, Peer) and peer.tls for peer in listener.toys.peers)


async def ask_by_tls(listener: Listener, context: ssl.SSLContext) -> None:
    async with connected(listener, context) as stream:
        await stream.send_all(post("t/store", b"x"))
        await Reader(stream).reply()


async def test_certificates_are_required_and_strangers_refused(authority, tmp_path):
    (tmp_path / "other").mkdir()
    strangers = Authority(tmp_path / "other", "strangers").issue("client", "ledger.internal")
    tls = secured(authority, client_ca=str(authority.file), client_certificates="required")
    async with running(tls=tls) as listener:
        for context in (authority.trusting(), authority.trusting(strangers)):
            with pytest.raises((trio.BrokenResourceError, ssl.SSLError, EOFError)):
                await ask_by_tls(listener, context)
        assert listener.toys.peers == []
    async with (
        running(tls=secured(authority)) as listener,
        connected(listener, authority.trusting(strangers)) as stream,
    ):
        await stream.send_all(post("t/store", b"x"))  # the server did not ask for a certificate
        assert (await Reader(stream).reply()).status == 200
        assert listener.toys.peers[0].certificate is None


# --- bounds ----------------------------------------------------------------------------------------


async def test_a_handshake_has_a_deadline(authority):
    tls = secured(authority)
    async with running(tls=tls, header_timeout_s=0.2) as listener:
        for said in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
            async with await listener.connect() as stream:
                if said:
                    await stream.send_all(said)
                with trio.fail_after(PATIENCE_S):
                    assert await end_of(stream)
        assert await tls.counted(3) == ["timeout"] * 3


@pytest.mark.parametrize("alpn", ["http/1.1", "h2"])
@pytest.mark.parametrize("said", [b"", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)])
async def test_a_connection_without_a_request_after_its_handshake_is_closed_where_names_are_required(
    authority, mock_clock, alpn, said
):
    guard, quick = Guard(required=True), {"header_timeout_s": 0.1, "keep_alive_s": 10 * PATIENCE_S}
    async with (
        running(tls=secured(authority), guard=guard, **quick) as listener,
        connected(listener, authority.trusting(), alpn) as stream,
    ):
        if said:
            await stream.send_all(said)
        # From here on time passes and limits the handshake. The clock does not jump, since a thread may load hypercorn.
        mock_clock.rate = 1
        with trio.fail_after(PATIENCE_S), suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass


async def test_hundreds_of_handshakes_at_a_time_are_all_served(authority):
    """As after a restart: every client has sent its hello before the first is answered."""
    tls, context, clients = secured(authority), authority.trusting(), []
    async with running(tls=tls) as listener:
        for _ in range(200):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with pytest.raises(ssl.SSLWantReadError):
                client.do_handshake()
            raw = await listener.connect()
            await raw.send_all(outgoing.read())
            clients.append((raw, client, incoming, outgoing))

        async def serve(raw, client, incoming, outgoing):
            async with raw:
                while True:
                    incoming.write(await raw.receive_some())
                    with suppress(ssl.SSLWantReadError):
                        client.do_handshake()
                        break
                client.write(post("t/store", b"x"))
                await raw.send_all(outgoing.read())
                while True:
                    incoming.write(await raw.receive_some())
                    with suppress(ssl.SSLWantReadError):
                        if answer := client.read(1 << 16):
                            break
                assert answer.startswith(b"HTTP/1.1 200 ")

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as serving:
                for each in clients:
                    serving.start_soon(serve, *each)
        assert await tls.counted(200) == ["ok"] * 200


async def test_a_handshake_that_has_stalled_makes_room_and_one_that_progresses_does_not(authority, mock_clock):
    tls = secured(authority)
    async with running(tls=tls, max_connections=2, header_timeout_s=1000) as listener:
        stalled, moving = await listener.connect(), await listener.connect()
        for stream in (stalled, moving):
            await stream.send_all(b"\x16\x03\x01\x02\x00\x01")
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with await listener.connect() as third:
            with trio.fail_after(PATIENCE_S):
                assert await end_of(third)  # neither has stalled
        mock_clock.jump(STALLED_S)
        await moving.send_all(b"\x00")
        await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.fail_after(PATIENCE_S):
            async with connected(listener, authority.trusting()) as stream:
                await stream.send_all(post("t/store", b"x"))
                assert (await Reader(stream).reply()).status == 200
            assert await end_of(stalled)
        assert await tls.counted(2) == ["timeout", "ok"]
        await stalled.aclose()
        await moving.aclose()


async def test_a_connection_over_the_bound_is_closed(authority):
    async with running(tls=secured(authority), max_connections=1) as listener, await listener.connect():
        second = await listener.connect()
        with trio.fail_after(PATIENCE_S):
            assert await end_of(second)
        await second.aclose()


async def end_of(stream: trio.SocketStream) -> bool:
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
    return True


# --- the socket itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_only_the_two_ends_of_a_connection_share_its_channel_binding(authority, version):
    trusting = authority.trusting()
    trusting.check_hostname = False
    trusting.minimum_version = trusting.maximum_version = version
    serving, bindings = secured(authority).serving, []
    for _ in range(2):
        pair = socket.socketpair()
        for each in pair:
            each.setblocking(False)
        ends = [TlsSocket(pair[0], serving), TlsSocket(pair[1], trusting, connected_to="127.0.0.1")]
        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(end.shake_hands)
        server, client = (end.binding for end in ends)
        assert server == client
        assert len(server) >= 12
        bindings.append(server)
        for each in pair:
            each.close()
    assert bindings[0] != bindings[1]


async def test_a_short_recv_means_that_no_more_is_buffered_and_a_send_continues_where_it_stopped(authority):
    """Two ends talk over a pair of sockets with small buffers, in random steps."""
    left, right = socket.socketpair()
    for each in (left, right):
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    server = TlsSocket(left, secured(authority).serving)
    trusting = authority.trusting()
    trusting.check_hostname = False
    client = TlsSocket(right, trusting, connected_to="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.shake_hands)
        nursery.start_soon(client.shake_hands)
    rng = random.Random(3)
    sent = rng.randbytes(3_000_000)
    rest, received = memoryview(sent), bytearray()
    with trio.fail_after(PATIENCE_S):
        while len(received) < len(sent):
            await trio.lowlevel.checkpoint()
            if rest and rng.random() < 0.6:
                rest = rest[client.send(rest[: rng.randint(1, 300_000)]) :]
            wanted = rng.choice([1, 100, 16_384, 65_536, 300_000])
            try:
                data = server.recv(wanted)
            except BlockingIOError:
                continue
            received += data
            if len(data) < wanted:
                with pytest.raises(BlockingIOError):
                    server.recv(1)
    assert bytes(received) == sent
    client.shutdown(socket.SHUT_WR)
    await trio.testing.wait_all_tasks_blocked()
    assert server.recv(100) == b""
    assert server.ended
    left.close()
    right.close()
