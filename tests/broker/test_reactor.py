"""Requests that start without a task: answered in order and within bounds, and every connection is closed."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

import pytest
import trio
import trio.lowlevel
import trio.testing
from listeners import SETTINGS, Reader, post
from quart_trio import QuartTrio

from actors.mailbox import RunQueue
from broker.api.routes import ROUTES
from broker.http import reactor as reactor_module
from broker.http.budgets import FREE_BYTES, AnswerBudget, BodyBudget
from broker.http.connection import BRIEF_LINGER_S, GATHERED_BYTES, MAX_PIPELINED_BYTES
from broker.http.handlers import RequestTasks
from broker.http.http1 import SENT_NOW_BYTES, Http1
from broker.http.messages import Answer
from broker.http.reactor import BUSY_POLL_S, QUICK_S, QUICK_TURNS, Reactor, open_reactor
from broker.http.route import Endpoint
from broker.http.server import serve_http
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import TopicNotFound
from plainsong.protocol.names import TopicName
from storage.leveldb import LevelDBStore
from tests import waiting
from tests.patience import PATIENCE_S

#: Some of these tests stop the clock.
until = partial(waiting.until, every_s=0.0)
NAME = TopicName("bench", "topic")
PUBLISH = next(route for route in ROUTES if route.name == "publish")


@dataclass(eq=False)
class Started:
    """A server that starts publishes, which the test answers."""

    port: int = 0
    budget: BodyBudget = field(default_factory=lambda: BodyBudget(SETTINGS.max_inflight_bytes, AnswerBudget(1 << 20)))
    stop: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    waiting: list = field(default_factory=list)
    mail: list = field(default_factory=list)
    turns: RunQueue = field(default_factory=RunQueue)
    by_task: int = 0
    tasks: RequestTasks | None = None

    def handle(self, request, answered):
        topic = request.path["topic"]
        if topic == "missing":
            answered(TopicNotFound("no topic 'missing'"))
        elif topic == "bug":
            answered(ZeroDivisionError("a secret"))
        elif topic == "task":
            self.tasks.run(self.in_a_task, request, answered)
        elif topic == "turn":
            self.mail.append((request, answered))
            self.turns.soon(self)
        elif topic == "echo":
            answered(Answer(200, request.body))
        else:
            self.waiting.append((request, answered))

    def turn_now(self):
        """Answer the requests that have arrived, as an actor would."""
        mail, self.mail = self.mail, []
        for request, answered in mail:
            answered(Answer(200, b"turn:" + request.body))

    async def in_a_task(self, request):
        self.by_task += 1
        return Answer(200, b"task:" + request.body)

    async def until_waiting(self, count):
        await until(lambda: len(self.waiting) >= count)

    def answer(self, body=b"done"):
        request, answered = self.waiting.pop(0)
        answered(Answer(200, body))
        return request

    async def answer_all(self):
        while True:
            await trio.lowlevel.checkpoint()
            while self.waiting:
                request, answered = self.waiting.pop(0)
                answered(Answer(200, request.body))

    async def connect(self):
        return Client(await trio.open_tcp_stream("127.0.0.1", self.port))


class Client(Reader):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.stream.aclose()

    async def send_all(self, data):
        await self.stream.send_all(data)


@asynccontextmanager
async def started(grace_s=5, **changes):
    server = Started()
    settings = replace(SETTINGS, **changes)
    async with trio.open_nursery() as nursery:
        server.tasks = RequestTasks(nursery)

        async def serve(task_status):
            async with open_reactor(settings.keep_alive_s, server.turns) as reactor:
                await serve_http(
                    settings,
                    [Endpoint(PUBLISH, server.handle)],
                    lambda: QuartTrio("nothing"),
                    reactor=reactor,
                    binds=["127.0.0.1:0"],
                    budget=server.budget,
                    stop=server.stop,
                    grace_s=grace_s,
                    task_status=task_status,
                )
            server.ended.set()

        (address,) = await nursery.start(serve)
        server.port = int(address.rpartition(":")[2])
        yield server
        server.stop.set()
        with trio.fail_after(PATIENCE_S):
            await server.ended.wait()


async def test_pipelined_requests_are_started_one_after_the_other_and_answered_in_order():
    async with started() as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"one") + post("t/publish", b"two") + post("task/publish", b"three"))
        await server.until_waiting(1)
        assert len(server.waiting) == 1
        assert server.answer(b"1").body == b"one"
        await server.until_waiting(1)
        assert server.answer(b"2").body == b"two"
        assert [(await client.reply()).body for _ in range(3)] == [b"1", b"2", b"task:three"]


async def test_pipelined_requests_of_every_kind_are_answered_in_any_combination():
    for behind in permutations(["t", "echo", "echo", "task", "t"]):
        async with started() as server, await server.connect() as client, trio.open_nursery() as nursery:
            nursery.start_soon(server.answer_all)
            sent = [f"{number}".encode() for number in range(len(behind))]
            await client.send_all(
                b"".join(post(f"{topic}/publish", body) for topic, body in zip(behind, sent, strict=True))
            )
            assert [(await client.reply()).body.removeprefix(b"task:") for _ in behind] == sent
            nursery.cancel_scope.cancel()


async def test_requests_that_a_task_left_unread_start_in_a_turn_of_the_reactor():
    async with started() as server, await server.connect() as client:
        body = b"x" * (GATHERED_BYTES + 10)
        first = post("task/publish", body)
        for _ in range(5):
            await client.send_all(first[:-2])
            await trio.testing.wait_all_tasks_blocked()
            await client.send_all(first[-2:] + post("turn/publish", b"second"))
            assert (await client.reply()).body == b"task:" + body
            assert (await client.reply()).body == b"turn:second"


async def test_a_client_that_sends_ahead_without_reading_is_read_no_further_than_allowed(monkeypatch):
    served = []
    opened = Http1.__init__
    monkeypatch.setattr(Http1, "__init__", lambda self, *args: (served.append(self), opened(self, *args))[1])
    async with started() as server, await server.connect() as client:
        ahead = post("echo/publish", b"x" * 100) * 1000
        most = 0
        with trio.move_on_after(0.5):
            while True:
                await client.send_all(ahead)
                most = max([most, *(len(each._connection.pending) for each in served)])  # it may not be accepted yet
        assert most < 2 * MAX_PIPELINED_BYTES + len(ahead) // 1000


async def test_a_stalled_body_does_not_wait_for_another_request():
    async with started(body_timeout_s=0.5) as server, await server.connect() as stuck, await server.connect() as slow:
        await stuck.send_all(post("t/publish", b"one"))
        await server.until_waiting(1)
        await slow.send_all(post("t/publish", b"x" * 1000)[:-1])
        with trio.fail_after(PATIENCE_S):
            assert (await slow.reply()).code == "malformed_body"
        server.answer()


async def test_a_stop_waits_for_a_body_that_is_arriving():
    async with started(grace_s=PATIENCE_S) as server, await server.connect() as client:
        whole = post("echo/publish", b"x" * 1000)
        await client.send_all(whole[:-1])
        await until(lambda: server.budget.reserved_bytes)
        server.stop.set()
        await trio.sleep(2 * BRIEF_LINGER_S)
        await client.send_all(whole[-1:])
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")


async def test_an_error_of_a_handler_is_a_problem_and_a_bug_reveals_nothing():
    async with started() as server, await server.connect() as client:
        await client.send_all(post("missing/publish", b"x"))
        reply = await client.reply()
        assert (reply.status, reply.code) == (404, "topic_not_found")
        await client.send_all(post("bug/publish", b"x"))
        reply = await client.reply()
        assert (reply.status, reply.code) == (500, "internal")
        assert b"secret" not in reply.body
        await client.send_all(post("echo/publish", b"on"))
        assert (await client.reply()).body == b"on"


@pytest.mark.parametrize("size", [1000, GATHERED_BYTES - 1000])
async def test_a_body_in_pieces_is_complete_and_counted_as_it_arrives(size, monkeypatch):
    monkeypatch.setattr(
        reactor_module, "GATHER_S", PATIENCE_S
    )  # the task takes a body over if its pieces are far apart
    async with started() as server, await server.connect() as client:
        body = bytes(range(256)) * (size // 256)
        whole = post("t/publish", body)
        half = len(whole) // 2
        await client.send_all(whole[:half])
        await until(lambda: server.budget.reserved_bytes)
        await client.send_all(whole[half:])
        await server.until_waiting(1)
        assert server.budget.reserved_bytes >= len(body)
        assert server.answer().body == body
        assert (await client.reply()).status == 200
        assert server.budget.reserved_bytes == 0


async def test_a_larger_body_is_left_to_the_task():
    async with started() as server, await server.connect() as client:
        await client.send_all(post("echo/publish", b"x" * GATHERED_BYTES))
        assert (await client.reply()).body == b"x" * GATHERED_BYTES


async def test_a_stalled_body_is_refused_at_its_time_limit_and_frees_its_memory():
    async with started(body_timeout_s=1.5) as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"x" * 1000)[:-1])
        with trio.fail_after(PATIENCE_S):
            reply = await client.reply()
        assert (reply.status, reply.code) == (400, "malformed_body")
        await until(lambda: not server.budget.reserved_bytes)


async def test_over_the_budget_a_body_is_refused_and_a_small_one_is_not():
    async with started() as server, await server.connect() as client:
        with server.budget.reserve() as held:
            held.grow(server.budget.max_bytes - 10)
            await client.send_all(post("t/publish", b"x" * (FREE_BYTES + 1)))
            reply = await client.reply()
            assert (reply.status, reply.code) == (503, "overloaded")
            await client.send_all(post("echo/publish", b"x" * FREE_BYTES))
            assert (await client.reply()).body == b"x" * FREE_BYTES


async def test_a_failing_connection_is_closed_and_ends_no_other(caplog, monkeypatch):
    async with started() as server, await server.connect() as client, await server.connect() as other:
        with monkeypatch.context() as patch:
            patch.setattr(Http1, "data_arrived", lambda _: 1 / 0)
            await client.send_all(post("echo/publish", b"x"))
            assert await client.at_end()
        await other.send_all(post("echo/publish", b"on"))
        assert (await other.reply()).body == b"on"
    assert [record.message for record in caplog.records] == ["a connection failed"]


async def test_a_client_that_closes_its_sending_half_gets_its_answer():
    async with started() as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"one") + post("echo/publish", b"two"))
        await client.stream.send_eof()
        await server.until_waiting(1)
        server.answer(b"late")
        assert (await client.reply()).body == b"late"
        assert (await client.reply()).body == b"two"
        assert await client.at_end()


async def test_an_answer_whose_client_has_gone_is_dropped_and_others_are_served(caplog):
    async with started() as server:
        async with await server.connect() as client:
            await client.send_all(post("t/publish", b"one"))
            await server.until_waiting(1)
        async with await server.connect() as other:
            server.answer()
            await other.send_all(post("echo/publish", b"on"))
            assert (await other.reply()).body == b"on"
        assert server.budget.reserved_bytes == 0
    assert not caplog.records


async def test_a_stop_answers_only_started_requests():
    async with started(grace_s=PATIENCE_S) as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"one"))
        await server.until_waiting(1)
        server.stop.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not server.ended.is_set()
        server.answer(b"last")
        reply = await client.reply()
        assert (reply.body, reply.headers["connection"]) == (b"last", "close")
        assert await client.at_end()


async def test_an_idle_connection_is_closed_and_one_that_waits_for_its_answer_is_not(mock_clock):
    async with (
        started(keep_alive_s=3) as server,
        await server.connect() as resting,
        await server.connect() as waiting,
    ):
        await waiting.send_all(post("t/publish", b"one"))
        await server.until_waiting(1)
        mock_clock.autojump_threshold = 0  # both are blocked from now on, so the clock jumps
        assert await resting.at_end()
        server.answer(b"late")
        assert (await waiting.reply()).body == b"late"


async def test_a_large_answer_is_left_to_the_task_and_counted():
    async with started() as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"one"))
        await server.until_waiting(1)
        server.answer(b"y" * (1 << 20))
        assert (await client.reply()).body == b"y" * (1 << 20)
        await client.send_all(post("task/publish", b"on"))
        assert (await client.reply()).body == b"task:on"
        assert server.by_task == 1


@pytest.mark.parametrize("kept", [True, False])
async def test_a_request_whose_body_its_task_has_read_is_answered_without_the_task(kept, monkeypatch):
    monkeypatch.setattr(Http1, "_send", None)
    headers = ("Transfer-Encoding: chunked", *(() if kept else ("Connection: close",)))
    async with started() as server, await server.connect() as client:
        for _ in range(1 + kept):
            await client.send_all(post("t/publish", b"3\r\none\r\n0\r\n\r\n", *headers))
            await server.until_waiting(1)
            assert server.budget.reserved_bytes
            request = server.answer()
            assert (request.body, request.prepare is not None) == (b"one", True)
            assert not server.budget.reserved_bytes
            assert (await client.reply()).body == b"done"
        if not kept:
            assert await client.at_end()


async def test_the_stream_of_an_answer_whose_connection_has_ended_is_closed(monkeypatch):
    class Pieces:
        closed = False

        async def aclose(self):
            Pieces.closed = True

    async def cut(self, answer, *, keep):
        self._made = (answer, keep, None)  # as if the connection had ended before its task ran
        raise OSError("it has ended")

    monkeypatch.setattr(Http1, "_send_made", cut)
    async with started() as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"one"))
        await server.until_waiting(1)
        server.answer(Pieces())
        await until(lambda: Pieces.closed)


async def test_an_answer_prepared_too_late_does_not_replace_a_large_one_of_the_next_request():
    async with started() as server, await server.connect() as client:
        await client.send_all(post("t/publish", b"first"))
        await server.until_waiting(1)
        first = server.answer(b"too late")
        assert (await client.reply()).body == b"too late"
        await client.send_all(post("t/publish", b"second"))
        await server.until_waiting(1)
        large = b"x" * (SENT_NOW_BYTES + 1)
        server.answer(large)
        first.prepare(Answer(200, b"of the first"))  # its actor prepares it after the first one's time limit
        assert (await client.reply()).body == large


async def test_an_answer_that_is_not_large_is_sent_without_the_task_and_frees_its_reservation(monkeypatch):
    monkeypatch.setattr(Http1, "_send_made", None)
    async with started() as server, await server.connect() as client:
        for size in (FREE_BYTES, FREE_BYTES + 1, SENT_NOW_BYTES):
            await client.send_all(post("t/publish", b"one"))
            await server.until_waiting(1)
            server.answer(b"y" * size)
            assert (await client.reply()).body == b"y" * size
            assert server.budget.answers.reserved_bytes == 0


async def test_the_unread_part_of_such_an_answer_keeps_its_reservation():
    async with started() as server, await server.connect() as client:
        answers, sent = server.budget.answers, 0
        while not answers.reserved_bytes:
            assert sent < 1000, "the kernel takes it all"
            await client.send_all(post("t/publish", b"one"))
            await server.until_waiting(1)
            server.answer(b"%05d" % sent + b"y" * 60_000)
            sent += 1
        assert answers.reserved_bytes > 60_000
        for number in range(sent):
            assert (await client.reply()).body == b"%05d" % number + b"y" * 60_000
        await until(lambda: not answers.reserved_bytes)


async def test_an_abandoned_answer_frees_its_reservation():
    async with started() as server:
        async with await server.connect() as client:
            while not server.budget.answers.reserved_bytes:
                await client.send_all(post("t/publish", b"one"))
                await server.until_waiting(1)
                server.answer(b"y" * 60_000)
        await until(lambda: not server.budget.answers.reserved_bytes)


async def test_with_little_budget_left_such_an_answer_is_left_to_the_task(monkeypatch):
    made = []
    send_made = Http1._send_made
    monkeypatch.setattr(
        Http1, "_send_made", lambda self, *args, **more: made.append(self) or send_made(self, *args, **more)
    )
    async with started() as server, await server.connect() as client:
        answers = server.budget.answers
        answers.reserved_bytes += answers.max_bytes // 2
        await client.send_all(post("t/publish", b"one"))
        await server.until_waiting(1)
        server.answer(b"y" * 60_000)
        reply = await client.reply()
        assert (reply.body, reply.headers["vary"]) == (b"y" * 60_000, "Accept-Encoding")
        assert len(made) == 1
        await until(lambda: answers.reserved_bytes == answers.max_bytes // 2)


# --- a store's wake-up -----------------------------------------------------------------------------


class Told:
    """A trio token that counts the calls that wake trio."""

    def __init__(self):
        self.calls, self._token = 0, trio.lowlevel.current_trio_token()

    def run_sync_soon(self, call, **options):
        self.calls += 1
        self._token.run_sync_soon(call, **options)


async def test_commits_wake_the_loop_by_the_bell_while_a_server_runs_and_by_trio_before_and_after(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        claim = await store.claim(NAME)
        store._group_commit._loop = told = Told()

        async def commit() -> int:
            """Return the number of times that one commit wakes trio."""
            before = told.calls
            with trio.fail_after(PATIENCE_S):
                await store.write([put_one(Table.METADATA, b"key", b"value")], claim=claim)
            return told.calls - before

        for _ in range(2):
            assert sum([await commit() for _ in range(20)]) > 0  # not each: one may end before the loop sleeps
            reactor = Reactor(keep_alive_s=1000, waker=store.waker)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reactor.run)
                await trio.testing.wait_all_tasks_blocked()
                assert [await commit() for _ in range(20)] == [0] * 20
                nursery.cancel_scope.cancel()
            reactor.close()


# --- a client that sends a request after each answer -----------------------------------------------------


class Talker:
    """A member of a reactor that answers each byte by calling ``then``, together with its client."""

    def __init__(self, reactor):
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.served = 0
        self.then = lambda: None
        self._reactor = reactor
        reactor.add(self.ours, self)

    def readable(self, events=0):
        try:
            self.ours.recv(100)
        except BlockingIOError:
            return
        self.served += 1
        self.then()

    def give_up(self):
        raise AssertionError

    def ask(self):
        self.theirs.send(b"x")

    def close(self):
        self._reactor.remove(self.ours, self)
        self.ours.close()
        self.theirs.close()


class Clock:
    """The clock that measures gaps: it advances a little with each reading, and when the test moves it."""

    def __init__(self):
        self.now_s = 1000.0
        self.step_s = 1e-6

    def __call__(self):
        self.now_s += self.step_s
        return self.now_s


class Waits(trio.abc.Instrument):
    """Counts the event loop's polls of the kernel."""

    count = 0

    def before_io_wait(self, timeout):
        self.count += 1


@asynccontextmanager
async def conversing(monkeypatch):
    """Run a reactor and its client, on a clock that the test sets."""
    clock = Clock()
    monkeypatch.setattr(reactor_module, "perf_counter", clock)
    reactor = Reactor(keep_alive_s=1000)
    reactor.may_spin = lambda: True
    talker = Talker(reactor)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reactor.run)
            await trio.testing.wait_all_tasks_blocked()
            yield reactor, talker, clock
            nursery.cancel_scope.cancel()
    finally:
        talker.close()
        reactor.close()


async def talk(talker, times, between=lambda: None):
    """Send a request after each answer, ``times`` times; return the number of the loop's polls of the kernel."""
    waits, left, over = Waits(), times, trio.Event()

    def again():
        nonlocal left
        left -= 1
        between()
        if left:
            talker.ask()
        else:
            over.set()

    talker.then = again
    trio.lowlevel.add_instrument(waits)
    talker.ask()
    with trio.fail_after(PATIENCE_S):
        await over.wait()
    trio.lowlevel.remove_instrument(waits)
    return waits.count


async def test_a_client_that_asks_again_at_once_is_served_without_the_loop_asking_the_kernel_each_time(monkeypatch):
    async with conversing(monkeypatch) as (_, talker, _):
        count = await talk(talker, 2000)
        assert talker.served == 2000
        assert count < 200


async def test_the_reactor_does_not_spin_while_a_thread_of_the_store_works(monkeypatch):
    async with conversing(monkeypatch) as (reactor, talker, _):
        reactor.may_spin = lambda: False
        assert await talk(talker, 300) >= 300


async def test_the_reactor_does_not_spin_for_a_slow_client(monkeypatch):
    async with conversing(monkeypatch) as (_, talker, clock):
        monkeypatch.setattr(Reactor, "_busy_poll", lambda *_: pytest.fail("the reactor spins"))
        for _ in range(50):
            await talk(talker, 1)
            clock.now_s += QUICK_S


async def test_spinning_ends_without_requests_and_resumes_only_after_some_quick_ones(monkeypatch):
    async with conversing(monkeypatch) as (_, talker, clock):
        looks, in_vain = [], trio.Event()
        converse = Reactor._busy_poll

        def watched(self, until_s):
            looks.append(talker.served)
            converse(self, until_s)
            if self._quick_turns == 0:
                in_vain.set()

        monkeypatch.setattr(Reactor, "_busy_poll", watched)
        talker.then = lambda: talker.ask() if talker.served < 20 else None
        talker.ask()
        with trio.fail_after(PATIENCE_S):
            await in_vain.wait()
        assert talker.served == 20
        assert looks[0] > QUICK_TURNS
        looks.clear()
        clock.now_s += 1
        await talk(talker, QUICK_TURNS)
        assert looks == []


async def test_a_task_woken_by_a_request_runs_before_the_next_spin(monkeypatch):
    async with conversing(monkeypatch) as (_, talker, _):
        woken, late = [trio.Event()], []

        async def other():
            while True:
                await woken[-1].wait()
                woken.append(trio.Event())
                late.append(talker.served)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await talk(talker, 300, between=lambda: woken[-1].set() if talker.served % 10 == 0 else None)
            nursery.cancel_scope.cancel()
        # If both wake in the same round, one request is served before the task runs.
        assert [served // 10 for served in late[:29]] == list(range(1, 30))
        assert max(served % 10 for served in late[:29]) <= 1


async def test_spinning_for_a_client_ends_at_its_limit_for_timers_and_other_sockets(
    monkeypatch,
):
    async with conversing(monkeypatch) as (_, talker, clock):

        def work():
            clock.now_s += BUSY_POLL_S / 10

        assert await talk(talker, 1000, between=work) >= 1000 / 12


async def test_two_clients_are_served_by_turns_of_the_loop_so_that_their_requests_share_a_commit(monkeypatch):
    async with conversing(monkeypatch) as (reactor, talker, _):
        other, over = Talker(reactor), trio.Event()
        monkeypatch.setattr(Reactor, "_busy_poll", lambda *_: pytest.fail("the reactor spins"))

        def both():
            if talker.served != other.served:
                return
            if talker.served == 200:
                over.set()
                return
            talker.ask()
            other.ask()

        talker.then = other.then = both
        both()
        with trio.fail_after(PATIENCE_S):
            await over.wait()
        other.close()


async def test_spinning_ends_although_the_clock_is_stopped(monkeypatch):
    async with conversing(monkeypatch) as (_, talker, clock):
        clock.step_s = 0
        await talk(talker, 100)
        assert talker.served == 100


@pytest.mark.parametrize("served", [QUICK_TURNS + 1, QUICK_TURNS + 3], ids=["before it spins", "while it spins"])
async def test_a_member_due_for_another_call_is_called_without_other_events(monkeypatch, served):
    async with conversing(monkeypatch) as (reactor, talker, _):
        over, calls = trio.Event(), []

        def after_reading():
            """Answer the last request, after which the client has pipelined more."""
            if talker.served == served and not calls:
                calls.append(1)
                talker.readable = lambda events=0: over.set()
                reactor.again(talker)

        reactor.after_reading = after_reading
        talker.then = lambda: talker.ask() if talker.served < served else None
        talker.ask()
        with trio.fail_after(PATIENCE_S):
            await over.wait()


async def test_the_reactor_does_not_spin_for_two_clients_that_take_turns(monkeypatch):
    async with conversing(monkeypatch) as (reactor, talker, _):
        other, over = Talker(reactor), trio.Event()
        monkeypatch.setattr(Reactor, "_busy_poll", lambda *_: pytest.fail("the reactor spins"))
        talker.then = lambda: other.ask() if talker.served < 100 else over.set()
        other.then = talker.ask
        talker.ask()
        with trio.fail_after(PATIENCE_S):
            await over.wait()
        other.close()
