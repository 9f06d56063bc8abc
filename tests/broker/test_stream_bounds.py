"""Limits of a stream: memory, silence, and how it ends; the WebSocket and the requests are tested separately."""

from __future__ import annotations

import random
import ssl
import subprocess
from types import SimpleNamespace

import pytest
import trio
from broker_in_process import in_process
from listeners import running
from stream_talk import TARGET, Stream, open_stream, request
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Request

from broker.api.messages.stream import REQUEST_BYTES, LocalStream, StreamBounds
from broker.http.budgets import FEW_PARTS, BodyBudget
from broker.http.connection import BRIEF_LINGER_S
from broker.http.floods import CONTROL_BURST
from broker.http.websocket import StreamSocket
from plainsong.protocol.codec import stream as codec
from tests.patience import PATIENCE_S


class Echo:
    """A conversation that echoes each message once it is released."""

    headers = ()

    def __init__(self, namespace, topic, request_id, held, who) -> None:
        self.said: list[bytes] = []
        self.finished = False
        self.closed = trio.Event()
        self.released = trio.Event()
        self.arrived = trio.Event()
        if topic != "held":
            self.released.set()

    async def opened(self) -> None:
        pass

    @property
    def waiting(self) -> bool:
        return bool(self.said)

    async def take(self, messages) -> None:
        self.said += messages
        self.arrived.set()
        await self.released.wait()

    async def answers(self):
        while not (self.said and self.released.is_set()):
            if self.finished:
                return None
            self.arrived = trio.Event()
            await self.arrived.wait()
        said, self.said = self.said, []
        return b"".join(said)

    def finish(self) -> None:
        self.finished = True
        self.released.set()
        self.arrived.set()

    def close(self) -> None:
        self.closed.set()


def reach(listener):
    return SimpleNamespace(http=SimpleNamespace(base_url=f"http://127.0.0.1:{listener.port}"))


async def holds(listener, size):
    """Wait until exactly ``size`` bytes are reserved: a connection's share is returned only after it has ended."""
    with trio.fail_after(PATIENCE_S):
        while listener.budget.reserved_bytes != size:
            await trio.lowlevel.checkpoint()


# --- the WebSocket -----------------------------------------------------------------------------------


async def test_a_silent_stream_is_pinged_and_then_closed(mock_clock):
    async with running(begin=Echo, keep_alive_s=0.05) as listener, open_stream(reach(listener)) as stream:
        mock_clock.jump(1)  # only once it is open, even on a slow machine
        assert isinstance(await stream.event(), Ping)
        mock_clock.jump(1)
        assert (await stream.closed())[0] == 1001
        assert await stream.event() is None


async def test_a_stream_that_answers_pings_stays_open(mock_clock):
    async with running(begin=Echo, keep_alive_s=0.05) as listener, open_stream(reach(listener)) as stream:
        for _ in range(3):
            mock_clock.jump(1)  # the clock is then stopped until the pong has arrived
            ping = await stream.event()
            assert isinstance(ping, Ping)
            await stream.say(ping.response(), BytesMessage(b"still here"))
            assert (await stream.event()).data == b"still here"


async def test_an_endless_message_is_abandoned_and_its_memory_freed():
    async with running(begin=Echo, body_timeout_s=0.05) as listener, open_stream(reach(listener)) as stream:
        await stream.say(BytesMessage(b"x" * 100, message_finished=False))
        assert (await stream.closed())[0] == 1008
        assert await stream.event() is None
        await holds(listener, 0)


def client_frame(payload=b"", *, opcode=2, last=True):
    """Return a client's frame, masked with zeros."""
    assert len(payload) < 126
    return bytes((opcode | (0x80 if last else 0), 0x80 | len(payload))) + bytes(4) + payload


@pytest.fixture
def most_frames(monkeypatch):
    """Record the largest number of frames taken without a pause."""
    most = [0]
    take = StreamSocket._take_frames

    def counting(self, events, taken):
        frames = []
        more = take(self, (frames.append(event) or event for event in events), taken)
        most[0] = max(most[0], len(frames))
        return more

    monkeypatch.setattr(StreamSocket, "_take_frames", counting)
    return most


async def test_a_message_of_many_tiny_pieces_is_read_a_few_at_a_time_and_costs_only_its_bytes(most_frames):
    pieces = 5000
    async with running(begin=Echo) as listener, open_stream(reach(listener), "held") as stream:
        await stream.socket.send_all(client_frame(b"xy", last=False))
        await stream.socket.send_all(client_frame(b"xy", opcode=0, last=False) * pieces)
        await holds(listener, 2 * (pieces + 1))
        await stream.socket.send_all(client_frame(b"z", opcode=0))
        await holds(listener, 2 * (pieces + 1) + 1)
    assert most_frames[0] == FEW_PARTS


async def test_many_small_messages_are_read_a_few_at_a_time(most_frames):
    async with running(begin=Echo) as listener, open_stream(reach(listener)) as stream:
        await stream.socket.send_all(client_frame(b"0123456789abcdef") * 2000)
        heard = 0
        while heard < 2000 * 16:
            heard += len((await stream.event()).data)
    assert most_frames[0] == FEW_PARTS


@pytest.mark.parametrize(
    "frames",
    [client_frame(b"", opcode=9), client_frame(b"", opcode=10), client_frame(b"")],
    ids=["ping", "pong", "empty-message"],
)
async def test_a_flood_of_frames_without_content_closes_with_1008(mock_clock, frames):
    del mock_clock  # the clock is stopped, except for slices of long work
    async with running(begin=Echo) as listener, open_stream(reach(listener)) as stream:
        await stream.send(b"first")
        await stream.socket.send_all(frames * (CONTROL_BURST + 200))
        code = None
        while code is None:
            event = await stream.event()
            code = int(event.code) if isinstance(event, CloseConnection) else None
        assert code == 1008


async def test_empty_pieces_close_with_1008(mock_clock):
    del mock_clock
    async with running(begin=Echo) as listener, open_stream(reach(listener)) as stream:
        begun = client_frame(b"x", last=False)
        await stream.socket.send_all(begun + client_frame(b"", opcode=0, last=False) * (CONTROL_BURST + 200))
        assert (await stream.closed())[0] == 1008


async def test_a_budget_without_room_closes_with_1013():
    async with running(begin=Echo, max_body_bytes=5000, max_inflight_bytes=10_000) as listener:
        holding = listener.budget.reserve()
        holding.grow(9000)
        async with open_stream(reach(listener)) as stream:
            await stream.send(b"x" * 4500)
            assert (await stream.closed())[0] == 1013
        await holds(listener, 9000)


async def test_reading_pauses_while_the_conversation_accepts_no_more():
    async with running(begin=Echo, send_timeout_s=0.1) as listener, open_stream(reach(listener), "held") as stream:
        filled = False
        with trio.move_on_after(0.3):
            for _ in range(1000):
                await stream.send(b"x" * 100_000)
            filled = True
        assert not filled  # the sockets are full, and the daemon does not read
        assert listener.budget.reserved_bytes < 1 << 20


async def test_a_reader_that_stopped_reading_is_disconnected():
    async with running(begin=Echo, send_timeout_s=0.05) as listener, open_stream(reach(listener)) as stream:
        try:
            with trio.fail_after(PATIENCE_S):
                while True:  # until the answers fill both sockets
                    await stream.send(b"x" * 500_000)
        except trio.BrokenResourceError:
            pass
        await holds(listener, 0)


def test_any_bytes_end_a_stream_cleanly(caplog):
    async def main():
        async with running(begin=Echo, keep_alive_s=0.05, body_timeout_s=0.05) as listener:
            for seed in range(60):
                dice = random.Random(seed)
                async with open_stream(reach(listener)) as stream:
                    data = bytearray(dice.randbytes(dice.randrange(1, 300)))
                    if seed % 2:  # make half of them look more like a client's frames
                        data[0] = dice.choice([0x82, 0x02, 0x80, 0x00, 0x88, 0x89, 0x8A])
                        data[1:2] = bytes([0x80 | dice.randrange(128)])
                    with trio.fail_after(PATIENCE_S):
                        try:
                            await stream.socket.send_all(data)
                            while await stream.socket.receive_some(65536):
                                pass
                        except trio.BrokenResourceError:
                            pass
            async with open_stream(reach(listener)) as stream:
                await stream.send(b"well")
                assert (await stream.event()).data == b"well"
            await wait_all_tasks_blocked(0.01)
            assert listener.budget.reserved_bytes == 0

    # The clock advances only when every task is blocked, so that no connection idles out on a slow machine.
    trio.run(main, clock=MockClock(autojump_threshold=0.01))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_stop_answers_accepted_requests_and_closes_with_1001():
    async with running(begin=Echo) as listener, open_stream(reach(listener)) as stream:
        await stream.send(b"last")
        assert (await stream.event()).data == b"last"
        listener.stop.set()
        assert await stream.closed() == (1001, "the daemon is shutting down")
        assert await stream.event() is None
        with trio.fail_after(PATIENCE_S):
            await listener.ended.wait()


@pytest.mark.usefixtures("long_linger")
async def test_a_client_that_sends_messages_until_it_has_read_the_close_reads_it():
    async with running(begin=Echo) as listener, open_stream(reach(listener)) as stream:
        await stream.send(b"last")
        assert (await stream.event()).data == b"last"
        listener.stop.set()
        for _ in range(4):
            await trio.sleep(BRIEF_LINGER_S)
            await stream.send(b"too late")
        assert await stream.closed() == (1001, "the daemon is shutting down")


async def test_a_stream_works_over_tls(tmp_path):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=server", "-days", "2"]
    subprocess.run([*make, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    listening = SimpleNamespace(context=lambda: serving, count=lambda _: None)
    async with running(begin=Echo, tls=listening) as listener:
        secure = trio.SSLStream(await listener.connect(), trusting, server_hostname="127.0.0.1", https_compatible=True)
        stream = Stream(secure)
        await stream.say(Request(host="127.0.0.1", target=TARGET.format(topic="t")))
        assert isinstance(await stream.event(), AcceptConnection)
        await stream.send(b"whispered")
        assert (await stream.event()).data == b"whispered"
        await secure.aclose()


# --- the requests ------------------------------------------------------------------------------------


async def test_the_number_and_bytes_of_requests_in_progress_are_bounded():
    async with in_process() as daemon, trio.open_nursery() as nursery:
        await daemon.create()
        for bounds in (StreamBounds(100, 1 << 20), StreamBounds(1000, 100 * (REQUEST_BYTES + 4))):
            daemon.store.stall("write")
            held = BodyBudget(1 << 30).reserve()
            stream = LocalStream(daemon.service.publishing, daemon.service.accounting, "ns", "t", "id", held, bounds)
            tens = [
                b"".join(codec.encode_single(n, b"%04d" % n) for n in range(at, at + 10)) for at in range(0, 500, 10)
            ]

            async def take_all(stream=stream, tens=tens):
                for ten in tens:
                    await stream.take([ten])
                stream.finish()

            nursery.start_soon(take_all)
            await wait_all_tasks_blocked()
            assert held.reserved_bytes == 100 * (REQUEST_BYTES + 4)
            daemon.store.release("write")
            answered = []
            while (data := await stream.answers()) is not None:
                answered += codec.decode_answers(data)
            assert [number for number, _, _ in answered] == list(range(500))
            assert held.reserved_bytes == 0


async def test_a_request_larger_than_the_bound_is_sent_alone():
    async with in_process() as daemon:
        await daemon.create()
        held = BodyBudget(1 << 30).reserve()
        stream = LocalStream(
            daemon.service.publishing, daemon.service.accounting, "ns", "t", "id", held, StreamBounds(10, 100)
        )
        await stream.take([codec.encode_single(1, b"x" * 1000)])
        data = await stream.answers()
        assert [answer[:2] for answer in codec.decode_answers(data)] == [(1, 200)]


async def test_a_budget_without_room_refuses_requests_as_it_does_bodies():
    async with in_process() as daemon:
        await daemon.create()
        stream = LocalStream(
            daemon.service.publishing, daemon.service.accounting, "ns", "t", "id", BodyBudget(5000).reserve()
        )
        await stream.take([request(1, b"a"), request(2, b"x" * 10_000, ttlSeconds=5), request(3, b"b")])
        stream.finish()
        answered = []
        while (data := await stream.answers()) is not None:
            answered += codec.decode_answers(data)
        assert [(number, fields.get("code")) for number, _, fields in answered] == [
            (1, None),
            (2, "overloaded"),
            (3, None),
        ]
