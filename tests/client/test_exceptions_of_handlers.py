"""Signal handlers that raise an exception at any point of a call leave the client usable."""

from __future__ import annotations

import dis
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import pytest

from plainsong import Client
from plainsong._sync import _pool
from plainsong.transport import dialing
from tests.patience import PATIENCE_S

#: Instructions after which Python checks for signals; it also does so at the start of a function.
LOOKS_AFTER = ("CALL", "JUMP_BACKWARD", "RESUME")
FILES = {_pool.__file__, dialing.__file__}


class Interrupted(BaseException):
    """Raised by the handler."""


@cache
def places_of(code: CodeType) -> set[int]:
    """Return the offsets of instructions before which Python runs signal handlers."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    return {after.offset for before, after in pairwise(instructions) if before.opname.startswith(LOOKS_AFTER)}


class Handler:
    """Raises at the place with this number, counted over all code of ``files`` that runs."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.has_raised or frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in places_of(frame.f_code):
            if not self._left:
                self.has_raised = True
                raise Interrupted
            self._left -= 1
        return self


def interrupt_everywhere(work: Callable[[], object], then: Callable[[], object]) -> int:
    """Interrupt ``work`` at each place in turn, call ``then`` after each, and return the number of places."""
    number = 0
    while True:
        handler = Handler(number)
        before = sys.gettrace()
        sys.settrace(handler)
        try:
            work()
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
        if not handler.has_raised:
            return number
        then()
        number += 1


@pytest.mark.parametrize("is_new", [False, True], ids=["a kept connection", "a new connection"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a lost connection is never closed
def test_an_exception_anywhere_in_a_call_costs_no_connection(shared_url: str, topic: str, is_new: bool):
    with Client(shared_url, max_connections=1, request_timeout_s=PATIENCE_S, deadline_s=PATIENCE_S) as client:
        connections = client._channel.pool
        client.poll(topic)

        def call() -> None:
            client.poll(topic)

        def then() -> None:
            assert len(connections._connections._leases) <= 1
            client.poll(topic)
            assert not connections._connections._leases
            if is_new:
                connections._connections._idle.pop().close()

        if is_new:
            connections._connections._idle.pop().close()
        assert interrupt_everywhere(call, then) > 50


def test_a_lost_lease_wakes_nothing_and_is_noticed_by_the_request_that_waits(shared_url: str, topic: str):
    with Client(shared_url, max_connections=1, request_timeout_s=PATIENCE_S) as client:
        client.poll(topic)
        connections = client._channel.pool._connections
        lost = _pool.Lease()
        origin = _pool._origin(shared_url)
        connections.take(lost, origin, 1.0, float("inf"), dialing.Dialing()).close()
        del lost
        assert len(client.poll(topic)) == 0


@pytest.mark.parametrize("module", ["fastavro", "fastavro.types", "fastavro.write"])
def test_a_first_call_that_is_interrupted_while_modules_load_leaves_a_client_that_works(
    shared_url: str, topic: str, module: str
):
    text = """
        import sys, threading
        from plainsong import Client

        class Handler:
            '''Raises within an import of the main thread, as a signal handler can; and once in the main thread itself.'''
            def find_spec(self, name, path=None, target=None):
                if name == sys.argv[3]:
                    sys.meta_path.remove(self)
                    if threading.current_thread() is threading.main_thread():
                        raise KeyboardInterrupt
                    _thread.interrupt_main()

        import _thread
        sys.meta_path.insert(0, Handler())
        with Client(sys.argv[1]) as client:
            try:
                client.publish(sys.argv[2], b"first")
            except KeyboardInterrupt:
                client.publish(sys.argv[2], b"second")
            else:
                raise SystemExit("not interrupted")
    """
    program = [sys.executable, "-c", textwrap.dedent(text), shared_url, topic, module]
    subprocess.run(program, check=True, timeout=PATIENCE_S)
