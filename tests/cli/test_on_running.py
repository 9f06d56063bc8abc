"""Commands as effects: their input and the meaning of their exit status; and no process is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from plainsong.messages import Message, Origin
from plainsong.react.command import CHUNK, Runner, environment_of, variable_of, verdict_of
from plainsong.react.reaction import Done, Reject, Retry
from plainsong.react.stopping import Stop, Stopped
from tests.daemon.harness import ROOT, eventually
from tests.patience import PATIENCE_S

ID = bytes.fromhex("0000018bcfe56805000100000000000000000000")


def message(payload=b"", attributes=None):
    return Message(Origin("orders"), ID, payload, attributes=attributes or {})


class Collected:
    """Collects output."""

    def __init__(self):
        self.got = {"stdout": b"", "stderr": b""}
        self.ends = 0
        self.began = threading.Event()

    def take(self, message, stream, data):
        self.got[stream] += data
        self.began.set()

    def end(self, message):
        self.ends += 1


@pytest.fixture
def stop():
    stop = Stop(grace_s=60)
    yield stop
    stop.close()


@pytest.fixture
def output():
    return Collected()


@pytest.fixture
def shell(stop, output):
    """Return a function that runs a shell command line with a payload."""

    def call(line, payload=b"", *, timeout_s=PATIENCE_S, attributes=None, attempt=1):
        runner = Runner(["/bin/sh", "-c", line], os.environ, "shop", timeout_s=timeout_s, stop=stop, output=output)
        return runner(message(payload, attributes), attempt)

    return call


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"  # dead, but not yet reaped by its new parent
    except FileNotFoundError:
        return True


# --- verdicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (0, Done()),
        (65, Reject("exit 65")),
        (1, Retry("exit 1")),
        (127, Retry("exit 127")),
        (-9, Retry("killed by SIGKILL")),
        (-60, Retry("killed by signal 60")),
    ],
)
def test_exit_code_0_is_success_65_is_permanent_and_any_other_is_retried(code, verdict):
    assert verdict_of(code) == verdict


def test_the_last_line_of_standard_error_says_why(shell):
    assert shell("echo first >&2; printf 'no \\033[1mcard\\n\\n' >&2; exit 65") == Reject("exit 65: no  [1mcard")
    assert verdict_of(1, b"\xff" + b"x" * 1000) == Retry("exit 1: \\xff" + "x" * 296)


def test_a_command_that_cannot_be_started_is_retried(stop, output):
    runner = Runner(["/no/such/command"], os.environ, "shop", timeout_s=1, stop=stop, output=output)
    verdict = runner(message(), 1)
    assert isinstance(verdict, Retry)
    assert "cannot start /no/such/command" in verdict.why


# --- its input ---------------------------------------------------------------------------------------


def test_the_payload_is_on_standard_input_byte_for_byte(shell, output):
    payload = bytes(range(256)) * (4 * CHUNK // 256)
    assert shell("cat", payload) == Done()
    assert output.got["stdout"] == payload


def test_a_command_need_not_read_its_input(shell):
    assert shell("exec <&-; exit 0", b"x" * (8 * CHUNK)) == Done()
    assert shell("exit 0", b"x" * (8 * CHUNK)) == Done()


def test_the_environment_describes_the_message(shell, output, monkeypatch):
    monkeypatch.setenv("PLAINSONG_ATTRIBUTE_OLD", "of another")
    monkeypatch.setenv("PLAINSONG_NAMESPACE", "another")
    attributes = {"routing-key": "ä b", "traceparent": "00-ab-cd-01"}
    assert shell("env", attributes=attributes, attempt=3) == Done()
    lines = output.got["stdout"].decode().splitlines()
    told = dict(line.split("=", 1) for line in lines if line.startswith(("PLAINSONG_", "TRACEPARENT")))
    assert told["PLAINSONG_TOPIC"] == "orders"
    assert told["PLAINSONG_NAMESPACE"] == "shop"
    assert told["PLAINSONG_MESSAGE_ID"] == ID.hex()
    assert told["PLAINSONG_PUBLISH_TIME_MS"] == "1700000000005"
    assert told["PLAINSONG_ATTEMPT"] == "3"
    assert told["PLAINSONG_ATTRIBUTE_ROUTING_KEY"] == "ä b"
    assert told["PLAINSONG_ATTRIBUTES"] == '{"routing-key": "\\u00e4 b", "traceparent": "00-ab-cd-01"}'
    assert told["TRACEPARENT"] == "00-ab-cd-01"
    assert "PLAINSONG_ATTRIBUTE_OLD" not in told


def test_attributes_that_no_variable_can_hold_are_only_in_the_json():
    told = environment_of(message(attributes={"a": "x\0y", "b-c": "first", "b_c": "second", "ü=": "1"}), 1)
    assert "PLAINSONG_ATTRIBUTE_A" not in told
    assert told["PLAINSONG_ATTRIBUTE_B_C"] == b"first"
    assert variable_of("ü=") == "PLAINSONG_ATTRIBUTE___"
    assert "\\u0000" in str(told["PLAINSONG_ATTRIBUTES"])
    assert "TRACEPARENT" not in environment_of(message(attributes={"traceparent": "a\nb"}), 1)


def test_words_are_not_a_shell_line(stop, output):
    runner = Runner(["echo", "$HOME; `id`"], os.environ, "shop", timeout_s=PATIENCE_S, stop=stop, output=output)
    assert runner(message(), 1) == Done()
    assert output.got["stdout"] == b"$HOME; `id`\n"


# --- its end -----------------------------------------------------------------------------------------


def test_an_attempt_that_takes_too_long_is_ended_with_its_process_group(shell, output, monkeypatch):
    # The clock jumps past the time-out once the command has printed everything, however slow the machine is.
    leap = lambda: time.monotonic() + (2 * PATIENCE_S if output.got["stderr"] else 0)  # noqa: E731
    monkeypatch.setattr("plainsong.react.command.monotonic", leap)
    verdict = shell("sleep 1000 & echo $!; echo slow >&2; wait")
    assert verdict == Retry(f"took longer than {PATIENCE_S:g} s: slow")
    sleeper = int(output.got["stdout"])
    eventually("the sleeper is gone", lambda: is_gone(sleeper))
    assert output.ends == 1


def test_a_command_that_ignores_sigterm_is_killed(shell, monkeypatch):
    monkeypatch.setattr("plainsong.react.command.KILL_AFTER_S", 0.1)
    assert shell("trap '' TERM; while :; do sleep 0.05; done", timeout_s=0.3) == Retry("took longer than 0.3 s")


def test_an_end_on_request_is_not_a_success(shell):
    assert isinstance(shell("trap 'exit 0' TERM; while :; do sleep 0.05; done", timeout_s=0.3), Retry)


def test_an_orphaned_process_that_holds_the_pipes_blocks_nothing(shell, output):
    began_s = time.monotonic()
    assert shell("echo before; sleep 1000 & echo $! >&2") == Done()
    assert time.monotonic() - began_s < PATIENCE_S
    assert output.got["stdout"] == b"before\n"
    os.kill(int(output.got["stderr"]), signal.SIGKILL)


def test_exits_are_noticed_without_kernel_support(shell, output, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert shell("cat", b"all of it") == Done()
    assert output.got["stdout"] == b"all of it"
    assert shell("exec sleep 1000", timeout_s=0.2) == Retry("took longer than 0.2 s")


def test_a_running_command_may_finish_after_the_first_request(shell, stop):
    stop.ask()
    assert shell("sleep 0.2; exit 0") == Done()


@pytest.mark.parametrize("how", ["second request", "grace over"])
def test_a_running_command_is_given_up_at_the_second_request_or_after_the_grace_period(shell, output, stop, how):
    if how == "grace over":
        stop._grace_s = 0.2
        stop.ask()
        with pytest.raises(Stopped):
            shell("exec sleep 1000")
    else:
        asking = threading.Thread(target=lambda: (output.began.wait(), stop.ask(), stop.ask()))
        asking.start()
        with pytest.raises(Stopped):
            shell("echo $$; exec sleep 1000")
        asking.join()
        assert is_gone(int(output.got["stdout"]))
    assert output.ends == 1


def test_an_interrupt_leaves_no_process(stop):
    class Broken(Collected):
        def take(self, message, stream, data):
            super().take(message, stream, data)
            raise BrokenPipeError

    output = Broken()
    runner = Runner(
        ["/bin/sh", "-c", "echo $$; exec sleep 1000"], {}, "shop", timeout_s=PATIENCE_S, stop=stop, output=output
    )
    with pytest.raises(BrokenPipeError):
        runner(message(), 1)
    assert is_gone(int(output.got["stdout"]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_command_dies_with_the_program(tmp_path):
    code = (
        "import os, sys; from tests.cli.test_on_running import *;"
        "Runner(['/bin/sh', '-c', 'echo $$; exec sleep 1000'], os.environ, 'n', timeout_s=60, stop=Stop(),"
        " output=type('Out', (), {'take': lambda s, m, n, d: (sys.stdout.buffer.write(d), sys.stdout.flush()),"
        " 'end': lambda s, m: None})())(message(), 1)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as program:
        child = int(program.stdout.readline())
        assert not is_gone(child)
        program.kill()
        program.wait()
        eventually("its command is gone", lambda: is_gone(child))


def test_as_the_first_process_of_a_container_it_leaves_no_zombies(tmp_path):
    """A process that pretends to be PID 1: ``getpid`` returns 1, and the kernel makes it the parent of orphans."""
    program = f"""
import ctypes, os, pathlib, time
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
own = os.getpid()
os.getpid = lambda: 1
from plainsong.messages import Message, Origin
from plainsong.react.command import reap_orphans
import subprocess

reads, writes = os.pipe()
shell = f"sh -c 'read line; exit 3' <&{{reads}} & echo $!"
subprocess.run(["sh", "-c", shell], stdout=open({str(tmp_path / "pid")!r}, "w"), pass_fds=[reads], check=True)
os.close(writes)  # it ends after its parent, which would take its exit code
orphan = int(pathlib.Path({str(tmp_path / "pid")!r}).read_text())
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
reap_orphans()
assert not pathlib.Path(f"/proc/{{orphan}}").exists()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_a_search_for_orphans_follows_the_end_of_a_command(shell, monkeypatch):
    looked = []
    monkeypatch.setattr("plainsong.react.command.reap_orphans", lambda: looked.append(True))
    assert isinstance(shell("exit 0"), Done)
    assert looked == [True]
