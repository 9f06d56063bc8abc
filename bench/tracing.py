"""Amount of code that one request executes: files entered, calls in them, and moves between files.

    python -m bench.tracing [--json]

The daemon and its client run in this process, on a temporary data directory. Between sending a request and reading its
response, a profiling hook counts every entry into one of our functions, either on all threads but the requester's (the
daemon's side), or only on the requester's (the client's side). A *call* is an entry into a function from one of ours,
including the resumption of a coroutine; a *move* is a call from another file of ours; a *turn* is one of the event loop
that executed code of ours; *threads* are others that did. Each figure is the median of several requests after a
warm-up, which removes the daemon's background work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from bench.bodies import path
from broker.config.load import load_config
from broker.main import run_daemon
from plainsong import Client
from plainsong.protocol.tephra.rpc import decode_reply, encode_call
from plainsong.protocol.tephra.thrift import ThriftFrames, framed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from plainsong.protocol.transactions.transaction import Transaction

ROOT = str(Path(__file__).parents[1]) + os.sep
PACKAGES = tuple(ROOT + name + os.sep for name in ("actors", "broker", "plainsong", "storage"))
JSON = {"Content-Type": "application/json"}
ROUNDS = 15


class Traced(NamedTuple):
    """The code that one request executed."""

    files: int
    calls: int
    moves: int
    turns: int
    threads: int


class Tracer(trio.abc.Instrument):
    """Counts while armed; installed once for all threads, before the daemon starts, and in the daemon's event loop."""

    def __init__(self) -> None:
        self._armed = False
        self._on_requester = False
        self._requester = 0
        self._files: set[str] = set()
        self._calls = 0
        self._moves = 0
        self._turn = 0
        self._turns: set[int] = set()
        self._threads: set[int] = set()

    def after_io_wait(self, timeout: float) -> None:
        """Count the turns of the event loop."""
        self._turn += 1

    def install(self) -> None:
        """Hook this thread and all threads started later."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._armed:
            return
        if (threading.get_ident() == self._requester) != self._on_requester:
            return
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGES):
            return
        self._files.add(file)
        if threading.current_thread() is threading.main_thread():
            self._turns.add(self._turn)
        else:
            self._threads.add(threading.get_ident())
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if caller.startswith(PACKAGES):
            self._calls += 1
            self._moves += caller != file

    def count(self, request: Callable[[], object], *, of_requester: bool) -> Traced:
        """Return the median of several requests."""
        found = []
        for number in range(ROUNDS + 3):
            self._files, self._calls, self._moves = set(), 0, 0
            self._turns, self._threads = set(), set()
            self._requester, self._on_requester = threading.get_ident(), of_requester
            self._armed = True
            request()
            self._armed = False
            if number >= 3:
                counted = len(self._turns), len(self._threads)
                found.append(Traced(len(self._files), self._calls, self._moves, *counted))
        return Traced(*(median_low(column) for column in zip(*found, strict=True)))


def measure(tracer: Tracer, url: str, tephra: str) -> dict[str, Traced]:
    """Return the traces by a description of the request."""
    topic = "traced"
    connection = HTTPConnection(url.removeprefix("http://"))
    numbers = iter(range(1, 1_000_000))

    def ask(method: str, target: str, body: object = None) -> None:
        connection.request(method, target, None if body is None else json.dumps(body), JSON)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {target}: {answer.status} {content.decode(errors='replace')[:300]}")

    def publish() -> None:
        ask("POST", f"{path(topic)}/publish", {"messages": ["hello"]})

    def poll() -> None:
        ask("POST", f"{path(topic)}/poll?isolation=committed", {"limit": 10})

    def poll_held() -> None:
        ask("POST", f"{path('held')}/poll?isolation=committed", {"limit": 10})

    def produce() -> None:
        body = {"messages": ["hello"], "producer": "p", "producerEpoch": 1, "sequenceIds": [next(numbers)]}
        ask("POST", f"{path(topic)}/publish", body)

    ask("PUT", path(topic))
    ask("PUT", f"{path(topic)}/producers/p")
    found = {
        "a plain publish": tracer.count(publish, of_requester=False),
        "a committed poll from the cache": tracer.count(poll, of_requester=False),
        "a publish of a producer": tracer.count(produce, of_requester=False),
    }
    began: list[int] = []

    def begin() -> None:
        connection.request("POST", "/v1/transactions", "{}", JSON)
        began.append(json.loads(connection.getresponse().read())["id"])

    def commit() -> None:
        ask("POST", f"/v1/transactions/{began.pop()}/commit")

    found["a begin"] = tracer.count(begin, of_requester=False)
    found["a commit"] = tracer.count(commit, of_requester=False)
    ask("PUT", path("held"))
    begin()
    for fields in ({}, {"transactionWritePointer": began[-1]}):
        ask("POST", f"{path('held')}/publish", {"messages": ["hello"]} | fields)
    found["a committed poll that meets an open transaction"] = tracer.count(poll_held, of_requester=False)
    commit()
    found.update(_measure_thrift(tracer, tephra))
    with Client(url) as client:
        client.create_topic("of-a-client", if_not_exists=True)

        def publish_by_client() -> None:
            client.publish("of-a-client", b"hello")

        def transaction() -> None:
            with client.transaction() as tx:
                tx.publish("of-a-client", b"hello")

        found["client.publish"] = tracer.count(publish_by_client, of_requester=True)
        found["with client.transaction() and one publish"] = tracer.count(transaction, of_requester=True)
    return found


def _measure_thrift(tracer: Tracer, address: str) -> dict[str, Traced]:
    """Return the traces of a transaction's calls by Tephra's client."""
    host, port = address.rsplit(":", 1)
    frames = ThriftFrames()
    begun: list[Transaction] = []
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call(method: str, *args: object) -> Any:
            sock.sendall(framed(encode_call(method, 1, *args)))
            while (message := frames.take()) is None:
                frames.feed(sock.recv(1 << 16))
            return decode_reply(message, method, 1)

        def begin() -> None:
            begun.append(call("startShortClientId", "traced"))

        def can_commit() -> None:
            call("canCommitOrThrow", begun[-1].transaction_id, ())

        def commit() -> None:
            transaction = begun.pop()
            call("commitOrThrow", transaction.transaction_id, transaction.write_pointer)

        steps = {"begins": begin, "asks if it can commit": can_commit, "commits": commit}
        return {f"Tephra's client {name}": tracer.count(step, of_requester=False) for name, step in steps.items()}


def run() -> dict[str, Traced]:
    """Run the daemon in this thread and the requests in another. Raises any exception of the requests."""
    tracer = Tracer()
    found: dict[str, Traced] = {}
    failed: list[BaseException] = []

    def requests(url: str, tephra: str) -> None:
        try:
            found.update(measure(tracer, url, tephra))
        except BaseException as error:  # noqa: BLE001 - raised again where the daemon has ended
            failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    with TemporaryDirectory() as data_dir:
        flags = {"http.bind": "127.0.0.1:0", "storage.data_dir": data_dir, "transactions.thrift": "127.0.0.1:0"}
        config = load_config(None, {}, flags).config
        tracer.install()

        async def daemon() -> None:
            trio.lowlevel.add_instrument(tracer)
            await run_daemon(
                config,
                announce=lambda running: threading.Thread(
                    target=requests, args=(running.addresses[0], running.thrift[0])
                ).start(),
            )

        trio.run(daemon)
        sys.setprofile(None)
    if failed:
        raise failed[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tracing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="for programs")
    wanted = parser.parse_args()
    found = run()
    if wanted.json:
        print(json.dumps({name: traced._asdict() for name, traced in found.items()}))
        return
    print(f"{'':<50}" + "".join(f"{column:>9}" for column in Traced._fields))
    for name, traced in found.items():
        print(f"{name:<50}" + "".join(f"{figure:>9}" for figure in traced))


if __name__ == "__main__":
    main()
