"""Both ends of a link prove that they have the cluster's secret before any frame is read."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import ssl
import time
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from linked import echo
from test_peer_handler import links, serving
from trio.testing import memory_stream_pair

from broker.config.config import config_of
from broker.http.sockets import passed_on
from broker.http.tls_socket import TlsSocket, TlsStream
from broker.link.client import UNPROVEN_PAUSE_S, Link, connect_by_tls
from broker.link.flow import LinkBroken
from broker.link.proof import LinkSecret, NotProven, link_secret
from broker.link.server import in_task, serve_link
from broker.link.wire import LinkBounds
from broker.security.files import FileUnusable
from broker.tls import Certificates, certificates_of
from tests.certificates import Authority

A, B = LinkSecret(b"s" * 32, "a"), LinkSecret(b"s" * 32, "b")
OTHER = LinkSecret(b"t" * 32, "b")


async def met(connector: LinkSecret | None, acceptor: LinkSecret | None) -> tuple[list[object], str]:
    """Connect both ends; return the calls that reached the acceptor, and why the link ended."""
    mine, theirs = memory_stream_pair()
    called: list[object] = []

    async def dispatch(call):
        called.append(call.value)
        return await echo(call)

    link = Link(mine, LinkBounds(dial_s=1.0), peer="theirs", secret=connector)
    why = ""
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            nonlocal why
            why = await link.run()

        nursery.start_soon(run)
        nursery.start_soon(partial(serve_link, theirs, in_task(dispatch), LinkBounds(dial_s=1.0), secret=acceptor))
        try:
            await link.call("echo", 1)
        except LinkBroken as error:
            assert connector is None or not error.sent  # without a secret the first frame has been sent
        link.cut()
        nursery.cancel_scope.deadline = trio.current_time() + 2
    return called, why


async def test_a_peer_with_the_secret_may_call(autojump_clock):
    assert (await met(A, B))[0] == [1]
    assert (await met(None, None))[0] == [1]


@pytest.mark.parametrize(("connector", "acceptor"), [(A, OTHER), (OTHER, A), (A, None), (None, A)])
async def test_a_peer_without_the_secret_is_cut_before_any_frame(autojump_clock, connector, acceptor):
    called, why = await met(connector, acceptor)
    assert called == []
    assert why


async def test_a_peer_that_could_not_prove_itself_is_logged_seldom_and_not_asked_again_soon(autojump_clock, caplog):
    dialled: list[float] = []
    ends = []

    async def dial(address: str):
        dialled.append(trio.current_time())
        mine, theirs = memory_stream_pair()
        ends.append(theirs)
        nursery.start_soon(partial(serve_link, theirs, in_task(echo), secret=OTHER))
        return mine

    with caplog.at_level(logging.WARNING, "plainsong.peering"):
        async with trio.open_nursery() as nursery, links(dial=dial, secret=A) as to:
            for _ in range(40):
                with pytest.raises(LinkBroken):
                    await (await to.to("b:1")).call("echo", 1)
                await trio.sleep(0.3)
            nursery.cancel_scope.cancel()
    assert all(later - earlier >= UNPROVEN_PAUSE_S for earlier, later in itertools.pairwise(dialled))
    assert 2 <= len(dialled) <= 4
    said = [record for record in caplog.records if record.message == "a peer could not prove itself"]
    assert 1 <= len(said) <= 4


class Tampering:
    """Two connected ends; ``change`` may alter the bytes in transit."""

    def __init__(self, change) -> None:
        self._change = change
        self.to, self.back = trio.open_memory_channel(10), trio.open_memory_channel(10)

    def ends(self):
        return _End(self.to[0], self.back[1], self._change), _End(self.back[0], self.to[1], self._change)


class _End:
    def __init__(self, out, into, change) -> None:
        self._out, self._into, self._change, self._rest = out, into, change, b""

    async def send(self, data: bytes) -> None:
        await self._out.send(self._change(data))

    async def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            with trio.move_on_after(1):
                self._rest += await self._into.receive()
                continue
            raise NotProven("nothing came")
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


async def exchanged(connector: LinkSecret, acceptor: LinkSecret, change, bindings=(b"", b"")) -> list[str | None]:
    mine, theirs = Tampering(change).ends()
    found: list[str | None] = [None, None]

    async def run(at, side, secret, talk) -> None:
        with contextlib.suppress(NotProven):
            found[at] = await secret.exchange(side, bindings[at], talk)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, 0, "connect", connector, mine)
        nursery.start_soon(run, 1, "accept", acceptor, theirs)
    return found


async def test_each_side_gets_the_name_of_the_other(autojump_clock):
    assert await exchanged(A, B, lambda data: data) == ["b", "a"]


async def test_a_proof_that_was_given_on_another_connection_proves_nothing(autojump_clock):
    assert await exchanged(A, B, lambda data: data, (b"one", b"one")) == ["b", "a"]
    for bindings in ((b"one", b"two"), (b"one", b""), (b"", b"two")):
        assert await exchanged(A, B, lambda data: data, bindings) == [None, None]


@pytest.mark.parametrize("at", [0, 5, 31, 32, 33, -1, -32])
async def test_a_changed_bit_proves_nothing(autojump_clock, at):
    def flip(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    assert await exchanged(A, B, flip) == [None, None]


async def test_a_replayed_proof_proves_nothing(autojump_clock):
    heard: list[bytes] = []
    assert await exchanged(A, B, lambda data: heard.append(data) or data) == ["b", "a"]
    replayed = iter(heard)
    assert (await exchanged(A, B, lambda data: next(replayed, b"")))[1] is None


@given(st.binary(max_size=200))
def test_noise_proves_nothing_and_raises_nothing_else(noise):
    async def run() -> None:
        talk = _End(None, None, None)
        talk._rest = noise + bytes(400)

        async def send(data: bytes) -> None:
            await trio.lowlevel.checkpoint()

        talk.send = send
        for side in ("accept", "connect"):
            with pytest.raises(NotProven):
                await A.exchange(side, b"", talk)

    trio.run(run)


# --- files -----------------------------------------------------------------------------------------


def test_the_secret_is_a_line_of_32_bytes_or_more_that_only_its_owner_reads(tmp_path):
    file = tmp_path / "secret"
    config = config_of({"cluster.secret_file": str(file)})
    for text, mode, why in (
        (None, 0, "No such file"),
        ("x" * 31, 0o600, "32 bytes"),
        ("x" * 40 + "\n" + "y" * 40, 0o600, "a single line"),
        ("x" * 40, 0o604, "all users"),
        ("x" * 40, 0o620, "written by its group"),
    ):
        if text is not None:
            file.write_text(text)
            file.chmod(mode)
        with pytest.raises(FileUnusable, match=why) as caught:
            link_secret(config, "a")
        assert str(file) in str(caught.value)
    file.chmod(0o600)
    found = link_secret(config, "a")
    assert found == LinkSecret(b"x" * 40, "a")
    assert "xxx" not in repr(found)
    assert link_secret(config_of({}), "a") is None


# --- over TLS --------------------------------------------------------------------------------------


async def test_links_use_tls_on_the_same_port_and_verify_the_other_end(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    values = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.file}
    certificates = Certificates(config_of({f"tls.{name}": str(path) for name, path in values.items()}).tls, time.time)
    async with serving(tls=certificates, secret=B) as server:
        dial = partial(connect_by_tls, lambda: certificates.now.links)
        async with links(dial=dial, secret=A) as to:
            link = await to.to(server.address)
            assert (await link.call("echo", 1, b"x" * 3_000_000)).body == b"x" * 3_000_000
        async with links(secret=A) as to:  # plain
            with pytest.raises(LinkBroken):
                await (await to.to(server.address)).call("echo", 1)
        (tmp_path / "other").mkdir()
        stranger = Authority(tmp_path / "other", "stranger")
        async with links(dial=partial(connect_by_tls, stranger.trusting), secret=A) as to:
            with pytest.raises(LinkBroken, match=r"(?i)certificate.verify"):
                await to.to(server.address)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("secret", [B, None])
async def test_without_a_secret_a_link_wants_a_certificate_for_the_host_of_its_address(tmp_path, secret, named):
    authority = Authority(tmp_path)
    pair = authority.issue("server", "one.example", addresses=("127.0.0.1",) if named else ())
    values = {
        "tls.certificate": str(pair.certificate),
        "tls.key": str(pair.key),
        "tls.client_ca": str(authority.file),
        "cluster.secret_file": "a secret" if secret else "",
    }
    certificates = certificates_of(config_of(values))
    assert certificates is not None
    dial = partial(connect_by_tls, lambda: certificates.now.links)
    async with serving(tls=certificates, secret=secret) as server, links(dial=dial, secret=secret) as to:
        if named or secret:
            assert (await (await to.to(server.address)).call("echo", 1)).value == 1
        else:
            with pytest.raises(LinkBroken, match=r"not valid for '127\.0\.0\.1'"):
                await to.to(server.address)
        certificates.look_again()
        assert certificates.now.links.check_hostname is (secret is None)


@pytest.mark.parametrize("minimum", ["1.2", "1.3"])
async def test_a_relay_with_a_certificate_of_the_same_authority_passes_no_call_on(tmp_path, minimum):
    """The relay terminates TLS on both sides, so it forwards the proof unchanged and could change calls."""
    authority = Authority(tmp_path)
    pairs = {name: authority.issue(name) for name in ("server", "relay")}
    own, relays = (
        Certificates(
            config_of(
                {
                    "tls.certificate": str(pair.certificate),
                    "tls.key": str(pair.key),
                    "tls.client_ca": str(authority.file),
                    "tls.minimum": minimum,
                }
            ).tls,
            time.time,
        )
        for pair in pairs.values()
    )
    if minimum == "1.2":
        own.now.links.maximum_version = ssl.TLSVersion.TLSv1_2
    relayed = []

    async with serving(tls=own, secret=B) as server, trio.open_nursery() as nursery:

        async def relay(stream: trio.SocketStream) -> None:
            tls = TlsSocket(socket.socket(fileno=stream.socket.detach()), relays.now.server)
            await tls.shake_hands()
            onward = await connect_by_tls(lambda: relays.now.links, server.address)
            relayed.append(True)
            await passed_on(TlsStream(tls), onward)

        listeners = await nursery.start(partial(trio.serve_tcp, relay, 0, host="127.0.0.1"))
        address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        dial = partial(connect_by_tls, lambda: own.now.links)
        async with links(dial=dial, secret=A) as to:
            with pytest.raises(LinkBroken):
                await (await to.to(address)).call("echo", 1)
        assert relayed
        async with links(dial=dial, secret=A) as to:
            assert (await (await to.to(server.address)).call("echo", 1)).value == 1
        nursery.cancel_scope.cancel()
