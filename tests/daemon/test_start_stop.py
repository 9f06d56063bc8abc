"""Start and stop of the daemon: its output, its refusals, and the order of its shutdown."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import pytest
import trio

from plainsong import __version__
from plainsong.cli.command import Exit
from plainsong.protocol.requests import PollRequest
from plainsong.protocol.tephra.rpc import decode_reply, encode_call
from plainsong.protocol.tephra.thrift import ThriftFrames, framed
from tests.daemon.harness import PLAINSONG, ROOT, Daemon, DaemonEnded, clean_environ, eventually, free_port
from tests.daemon.talk import Talk, ask, create, metric, poll, poll_call, publish, topic_path
from tests.patience import PATIENCE_S
from tests.storage.disks import make_read_only, small_disk, snapshot

PARKED = 100
#: A daemon that waits for a request exceeds ``SOON_S``.
LONG_DRAIN = "shutdown.drain_s=3600"
#: Time limit for a stop that waits for nothing; much less than ``LONG_DRAIN``.
SOON_S = PATIENCE_S


def test_port_0_is_a_free_port_that_is_reported_with_the_other_settings(daemon, tmp_path):
    running = daemon(forked=False)
    assert running.address[1] != 0
    assert ask(running.address, "GET", "/ping").body.strip() == b"OK"
    assert running.serving["data_dir"] == str(tmp_path / "data")
    assert running.serving["daemon_version"] == __version__
    assert "kill -9" in running.serving["durability"]


def test_the_banner_shows_address_store_and_durability(daemon, tmp_path):
    running = daemon("log.format=text", stdout=subprocess.PIPE)
    banner = [running.stdout.readline().decode().rstrip() for _ in range(6)]
    address = banner[0].removeprefix(f"plainsong {__version__} listens on http://")
    assert banner[1] == f"  data        {tmp_path / 'data'} (leveldb)"
    assert banner[2].startswith("  durability  ")
    assert "kill -9" in banner[2]
    assert banner[3] == "  decides     transactions itself"
    assert banner[4] == f"  console     http://{address}/console"
    command = shlex.split(banner[5].removeprefix("  try         "))
    assert command[:3] == ["curl", "-X", "PUT"]
    host, _, port = address.rpartition(":")
    assert command[3].startswith(f"http://{address}/")
    assert ask((host, int(port)), "PUT", command[3].removeprefix(f"http://{address}")).status == 200


@pytest.mark.parametrize("attempt", range(3))
def test_a_client_that_keeps_asking_until_the_daemon_has_stopped_is_answered_to_the_last(daemon, attempt):
    running = daemon(LONG_DRAIN)
    create(running.address, "busy")
    path, body = topic_path("busy", "/publish").encode(), b'{"messages": ["x"]}'
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(running.address, timeout=PATIENCE_S) as sock:
        for asked in range(1_000_000):
            if asked == 50 + attempt:
                begun = time.monotonic()
                running.signal(signal.SIGTERM)
            sock.sendall(head % (path, len(body)) + body)
            answer = sock.recv(65536).lower()
            # The connection must never close without an answer.
            assert answer.startswith((b"http/1.1 200", b"http/1.1 503"))
            if b"connection: close" in answer:
                break
    assert asked >= 50
    assert running.wait() == 0
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("attempt", range(3))
def test_every_call_of_tephras_clients_that_took_effect_before_the_daemon_stopped_was_answered(daemon, attempt):
    port = free_port()
    settings = "transactions.service=embedded", f"transactions.thrift=127.0.0.1:{port}", "storage.inline_commit_s=0"
    running = daemon(LONG_DRAIN, *settings)
    answered: set[int] = set()

    async def keep_beginning() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            frames = ThriftFrames()
            while True:
                await stream.send_all(framed(encode_call("startShort", 1)))
                while (message := frames.take()) is None:
                    data = await stream.receive_some()
                    if not data:
                        return
                    frames.feed(data)
                answered.add(decode_reply(message, "startShort", 1).transaction_id)
                if len(answered) == 50 + attempt:
                    running.signal(signal.SIGTERM)

    async def keep_beginning_until_the_end() -> None:
        with suppress(trio.BrokenResourceError):  # a call that arrives once the connection is closed resets it
            await keep_beginning()

    async def talk() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(keep_beginning_until_the_end)

    trio.run(talk)
    assert running.wait() == 0
    again = daemon(*settings)
    listed = json.loads(ask(again.address, "GET", "/v1/transactions?limit=1000").body)
    assert {int(each["id"]) for each in listed} <= answered


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_parked_polls_are_answered_and_the_daemon_stops_at_once(daemon, number):
    running = daemon(LONG_DRAIN)
    create(running.address, "quiet")
    call = poll_call("quiet", PollRequest(), "avro", wait_ms=60_000)
    answers = []

    async def answered(talk: Talk) -> None:
        answers.append(await talk.answer())

    async with AsyncExitStack() as stack:
        talks = [await stack.enter_async_context(await Talk.to(running.address)) for _ in range(PARKED)]
        for talk in talks:
            await talk.send(*call)
        await trio.to_thread.run_sync(
            eventually, "all are parked", lambda: metric(running.address, "plainsong_parked_polls") == PARKED
        )
        begun = time.monotonic()
        running.signal(number)
        async with trio.open_nursery() as nursery:
            for talk in talks:
                nursery.start_soon(answered, talk)
        code = await trio.to_thread.run_sync(running.wait)
    left_s = time.monotonic() - begun
    print(f"left {left_s:.3f} s after the signal")
    # Each poll would wait for 60 s, the maximum, part of which passes before all are parked.
    assert (code, left_s < 40) == (0, True)
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"\x00")] * PARKED


def test_a_second_signal_ends_it_at_once(daemon):
    """After the first signal the daemon waits for a body that never arrives."""
    running = daemon("shutdown.drain_s=600", "http.body_timeout_s=600", forked=False)
    create(running.address, "t")
    with socket.create_connection(running.address) as half:
        half.sendall(
            b"POST /v1/namespaces/ring/topics/t/publish HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        eventually("the body is awaited", lambda: metric(running.address, "plainsong_inflight_body_bytes") > 0)
        running.signal(signal.SIGTERM)
        running.wait_for_line('"event":"leaving"')
        assert not running.ended
        running.signal(signal.SIGTERM)
        assert running.wait() == 128 + signal.SIGTERM


def test_messages_published_before_sigterm_survive_it(daemon):
    running = daemon(forked=False)
    create(running.address, "t")
    receipt = publish(running.address, "t", b"one", b"two")
    assert running.stop() == 0
    running.start()
    assert [payload for _, payload in poll(running.address, "t")] == [b"one", b"two"]
    assert poll(running.address, "t")[0][0] == receipt.first_id


def refusal(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the exit code and errors of a daemon that does not start."""
    done = subprocess.run(
        [PLAINSONG, "serve", "--bind", "127.0.0.1:0", *arguments],
        env={**clean_environ(), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_second_daemon_is_refused_directory_and_address_and_the_first_is_unharmed(daemon, tmp_path):
    running = daemon()
    create(running.address, "t")
    code, error = refusal("--data-dir", str(tmp_path / "data"))
    assert code == Exit.STORE
    assert f"{tmp_path / 'data'} is in use by process {running.pid} " in error
    assert "hint: " in error
    port = running.address[1]
    code, error = refusal("--data-dir", str(tmp_path / "other"), "--bind", f"127.0.0.1:{port}")
    assert code == Exit.FAILED
    assert error.startswith(f"error: http.bind 127.0.0.1:{port} is in use\nhint: ")
    publish(running.address, "t", b"still here")
    assert [payload for _, payload in poll(running.address, "t")] == [b"still here"]


def test_newer_and_damaged_stores_are_refused_and_never_repaired(daemon, tmp_path):
    running = daemon()
    create(running.address, "t")
    publish(running.address, "t", b"kept")
    running.stop()
    directory = tmp_path / "data"
    shutil.copytree(directory, tmp_path / "damaged")
    shutil.copytree(directory, tmp_path / "sector")
    (directory / "FORMAT").write_text(json.dumps({"format": 99, "written_by": "9.0"}))
    (log,) = (tmp_path / "sector" / "volumes" / "00000001").glob("*.log")
    data = log.read_bytes()
    start = len(data.rstrip(b"\0")) // 512 * 512
    log.write_bytes(data[:start] + bytes(512) + data[start + 512 :])
    (tmp_path / "damaged" / "volumes" / "00000001" / "CURRENT").write_bytes(b"MANIFEST-nonsense\n")
    for store, said in (
        (directory, "has format 99, written by version 9.0"),
        (tmp_path / "damaged", "store explain"),
        (tmp_path / "sector", "has changed since it was closed"),
    ):
        before = rows_of(store)
        code, error = refusal("--data-dir", str(store))
        assert code == Exit.STORE
        assert said in error
        assert rows_of(store) == before


def rows_of(directory: Path) -> dict[str, bytes]:
    """Return LevelDB's files, except its text log."""
    return {name: data for name, data in snapshot(directory / "volumes").items() if "LOG" not in name}


def test_a_read_only_directory_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", 32) as disk:
        with Daemon(disk / "data", "storage.min_free_bytes=0") as running:
            create(running.address, "t")
            running.stop()
        make_read_only(disk)
        code, error = refusal("--data-dir", str(disk / "data"))
        assert code == Exit.STORE
        assert "Read-only file system" in error
        assert "hint: " in error


def test_the_service_manager_is_notified(daemon, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        said: list[bytes] = []

        def listen() -> None:
            """Receive constantly, as a service manager does: the daemon drops a notification while ten are queued."""
            while said[-1:] != [b"STOPPING=1"]:
                said.append(manager.recv(100))

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        # A notification every half second, so that a queue of ten outlasts a stall of this process.
        running = daemon(environ={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"})
        eventually("it reports that it is alive", lambda: said.count(b"WATCHDOG=1") > 2)
        assert running.stop() == 0
        listening.join(PATIENCE_S)
    assert (said[0], set(said[1:-1]), said[-1]) == (b"READY=1", {b"WATCHDOG=1"}, b"STOPPING=1")


def test_the_procfile_starts_it_on_the_port_of_the_environment(tmp_path):
    (line,) = [line for line in (ROOT / "Procfile").read_text().splitlines() if line.startswith("web:")]
    port = free_port()
    environ = {**clean_environ(), "PORT": str(port), "PLAINSONG_STORAGE__DATA_DIR": str(tmp_path / "data")}
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(["/bin/sh", "-c", "exec " + line.removeprefix("web:").strip()], cwd=ROOT, env=environ,
                               stdout=log, stderr=log, start_new_session=True)  # fmt: skip
    try:

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return any(ask((host, port), "GET", "/ping").status == 200 for host in ("127.0.0.1",))
            except OSError:
                return False

        eventually("it serves on PORT", answers)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        log.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_daemon_killed_while_it_makes_its_directory_can_start_there(daemon, tmp_path):
    """The daemon is killed at successively later moments of its first start."""
    whole_s = daemon(forked=False).start_s
    for part in (0.75, 0.95):
        with ExitStack() as stack:
            running = Daemon(tmp_path / f"killed at {part}", forked=False)
            stack.callback(running.end)
            running.spawn()
            time.sleep(whole_s * part)
            running.kill()
            running.start()
            create(running.address, "t")
            publish(running.address, "t", b"x")


def test_a_file_in_place_of_the_directory_is_reported(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DaemonEnded, match="is a file"), Daemon(tmp_path / "file", forked=False):
        pass
