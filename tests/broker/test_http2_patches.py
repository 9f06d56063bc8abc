"""Each patch of hypercorn's HTTP/2 is needed: without it, hypercorn's fault appears. A test that fails names the patch
that can be removed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, ResponseReceived, StreamReset
from h2.settings import SettingCodes
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from broker.http import floods
from broker.http.budgets import LongWork
from broker.http.http2.contradicted_lengths import ContradictedLengths
from broker.http.http2.extended_connect import ExtendedConnect
from broker.http.http2.frame_floods import FrameFloods
from broker.http.http2.late_data import LateData
from broker.http.http2.malformed_requests import MalformedRequests
from broker.http.http2.patch import Http2Bounds, Patch
from broker.http.http2.priorities import Priorities
from broker.http.http2.protocol import Http2Protocol
from broker.http.http2.small_windows import SmallWindows
from broker.http.http2.unfinished_uploads import UnfinishedUploads
from broker.http.http2.unknown_methods import UnknownMethods
from broker.http.http2.unread_bodies import UnreadBodies
from tests.broker.http2_talk import frame

#: On a clock that jumps when all tasks are blocked.
LONG_S = 60
READS, ANSWERS_EARLY, ANSWERS_LATE = b"/reads", b"/early", b"/late"


async def app(scope, receive, send, *_):
    if scope["path"] == READS.decode():
        while (await receive()).get("more_body"):
            pass
    if scope["path"] == ANSWERS_LATE.decode():
        await trio.sleep(5 * LONG_S)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answer"})


@dataclass
class Talk:
    """A client and hypercorn's protocol, in memory."""

    nursery: trio.Nursery
    protocol: Any = None
    h2: H2Connection = field(
        default_factory=lambda: H2Connection(
            H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding=None)
        )
    )
    statuses: dict[int, int] = field(default_factory=dict)
    resets: dict[int, int] = field(default_factory=dict)
    goaway: int | None = None
    fault: Exception | None = None
    #: Reads that the protocol has not handled completely: it reads one at a time.
    handling: int = 0
    #: The protocol's sends wait for it.
    may_send: trio.Event = field(default_factory=trio.Event)

    async def sent(self, event):
        """Receive an event of the protocol."""
        if isinstance(event, Closed):
            await self.protocol.handle(Closed())
        if not isinstance(event, RawData):
            return
        await self.may_send.wait()
        for each in self.h2.receive_data(event.data):
            if isinstance(each, ResponseReceived):
                self.statuses[each.stream_id] = int(dict(each.headers)[b":status"])
            elif isinstance(each, StreamReset):
                self.resets[each.stream_id] = int(each.error_code)
            elif isinstance(each, ConnectionTerminated):
                self.goaway = int(each.error_code)

    async def send(self, *data):
        """Let the protocol handle what the client has to send, and ``data``; return when all tasks are blocked."""

        async def handled(received):
            self.handling += 1
            try:
                await self.protocol.handle(RawData(received))
                self.handling -= 1
            except Exception as fault:  # noqa: BLE001 - the connection's end
                self.fault = fault

        self.nursery.start_soon(handled, self.h2.data_to_send() + b"".join(data))
        await trio.sleep(LONG_S)

    async def ask(self, path=READS, *headers, body=b"", ends=True, method=b"POST"):
        """Send a request; return its stream's id."""
        stream_id = self.h2.get_next_available_stream_id()
        places = [] if method == b"CONNECT" else [(b":scheme", b"http"), (b":path", path)]
        head = [(b":method", method), (b":authority", b"localhost"), *places, *headers]
        self.h2.send_headers(stream_id, head, end_stream=ends and not body)
        if body:
            self.h2.send_data(stream_id, body, end_stream=ends)
        await self.send()
        return stream_id

    async def is_served(self):
        if self.handling or self.fault is not None or self.goaway is not None:
            return False
        return self.statuses.get(await self.ask()) == 200


@asynccontextmanager
async def talking(protocol, tasks):
    async with trio.open_nursery() as nursery, tasks() as group:
        talk = Talk(nursery)
        config = Config()
        config.errorlog = None
        bounds = Http2Bounds(1 << 30, LongWork(), lambda _: None)
        talk.protocol = protocol(
            app, config, WorkerContext(None), group, ConnectionState({}), False, None, None, talk.sent, bounds=bounds
        )
        talk.may_send.set()
        talk.h2.initiate_connection()
        await talk.protocol.initiate()
        await talk.send()
        yield talk
        nursery.cancel_scope.cancel()


async def a_flood_ends_the_connection(talk):
    await talk.send(frame(6, bytes(8)) * (2 * floods.CONTROL_BURST))
    return talk.goaway == ErrorCodes.ENHANCE_YOUR_CALM


async def a_path_beyond_ascii_ends_its_stream_only(talk):
    refused = await talk.ask(b"/\xc3\xa4")
    return talk.resets.get(refused) == ErrorCodes.PROTOCOL_ERROR and await talk.is_served()


async def a_header_that_is_not_allowed_ends_its_stream_only(talk):
    refused = await talk.ask(READS, (b"connection", b"close"))
    return talk.resets.get(refused) == ErrorCodes.PROTOCOL_ERROR and await talk.is_served()


async def connect_is_not_implemented(talk):
    refused = await talk.ask(method=b"CONNECT", ends=False)
    return talk.statuses.get(refused) == 501 and await talk.is_served()


async def a_method_in_lower_case_is_not_implemented(talk):
    return talk.statuses.get(await talk.ask(method=b"post")) == 501


async def a_body_that_contradicts_its_length_reaches_the_application(talk):
    return talk.statuses.get(await talk.ask(READS, (b"content-length", b"4"), body=b"hello")) == 200


async def data_after_the_answer_is_dropped(talk):
    # The last of the answer cannot be sent yet, so the client has no reason to stop.
    talk.may_send = trio.Event()
    answered = await talk.ask(ANSWERS_EARLY, ends=False)
    headers, talk.may_send = talk.may_send, trio.Event()
    headers.set()
    await talk.send()
    assert talk.statuses[answered] == 200
    talk.h2.send_data(answered, b"late")
    await talk.send()
    talk.may_send.set()
    await talk.send()
    return await talk.is_served()


async def the_sender_of_an_answered_request_is_stopped(talk):
    answered = await talk.ask(ANSWERS_EARLY, ends=False)
    return talk.resets.get(answered) == ErrorCodes.NO_ERROR


async def a_client_may_send_a_mebibyte_at_once(talk):
    return talk.h2.remote_settings.initial_window_size >= 1 << 20 <= talk.h2.outbound_flow_control_window


async def extended_connect_is_not_announced(talk):
    return talk.h2.remote_settings.get(SettingCodes.ENABLE_CONNECT_PROTOCOL, 0) == 0


async def priorities_of_many_streams_cost_nothing(talk):
    for part in range(3):
        first = 2 * part * floods.CONTROL_BURST + 1
        ids = range(first, first + floods.CONTROL_BURST, 2)
        await talk.send(*(frame(2, bytes(4) + b"\x10", stream_id=each) for each in ids))
    return await talk.is_served()


async def an_answered_request_takes_the_rest_of_its_body(talk):
    answered = await talk.ask(ANSWERS_LATE, ends=False)
    await talk.send(frame(0, b"x", stream_id=answered) * 20)  # more than hypercorn queues
    await trio.sleep(10 * LONG_S)
    assert talk.statuses[answered] == 200
    return await talk.is_served()


CASES = [
    (FrameFloods, a_flood_ends_the_connection),
    (MalformedRequests, a_path_beyond_ascii_ends_its_stream_only),
    (MalformedRequests, a_header_that_is_not_allowed_ends_its_stream_only),
    (UnknownMethods, connect_is_not_implemented),
    (UnknownMethods, a_method_in_lower_case_is_not_implemented),
    (ContradictedLengths, a_body_that_contradicts_its_length_reaches_the_application),
    (LateData, data_after_the_answer_is_dropped),
    (UnfinishedUploads, the_sender_of_an_answered_request_is_stopped),
    (SmallWindows, a_client_may_send_a_mebibyte_at_once),
    (ExtendedConnect, extended_connect_is_not_announced),
    (Priorities, priorities_of_many_streams_cost_nothing),
    (UnreadBodies, an_answered_request_takes_the_rest_of_its_body),
]


@pytest.mark.parametrize(("patch", "is_right"), CASES, ids=[scenario.__name__ for _, scenario in CASES])
async def test_hypercorn_still_needs_the_patch(autojump_clock, patch, is_right):
    del autojump_clock
    async with talking(Http2Protocol, UnreadBodies) as talk:
        assert await is_right(talk)
    others = tuple(each for each in Http2Protocol.__bases__ if each is not patch)
    tasks = TaskGroup if patch is UnreadBodies else UnreadBodies
    async with talking(type("WithoutIt", others, {}), tasks) as talk:
        assert not await is_right(talk), f"hypercorn has fixed it: remove {patch.__module__}"


def test_every_patch_has_its_test():
    assert {*Http2Protocol.__bases__, UnreadBodies} == {patch for patch, _ in CASES}
    assert {*Patch.__subclasses__()} == {*Http2Protocol.__bases__}
