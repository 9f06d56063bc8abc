"""``plainsong on`` and its daemon under kill -9: every message in order, at least once, repeated only at kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import groupby
from threading import Thread

import pytest

from plainsong import Client
from tests.cli.conftest import url_of
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ, eventually, start_python
from tests.patience import PATIENCE_S
from tests.ports import free_address

MESSAGES = 40
KILLS = 3
NEVER = "case $PLAINSONG_MESSAGE_ID in *[05]00000000000000000000) exit 65;; esac;"


class Scene:
    """A daemon, a topic with messages, and the command; both processes can be killed and restarted."""

    def __init__(self, path, *arguments):
        self.effects = path / "effects"
        self.effects.touch()
        self.arguments = arguments
        self.daemon = Daemon(path / "data", bind=free_address()).start()
        self.url = url_of(self.daemon)
        self.process = None
        with Client(self.url) as client:
            client.create_topic("orders")
            client.create_topic("dead")
        self.publish(MESSAGES)

    def publish(self, count):
        with Client(self.url) as client:
            for first in range(0, count, 10):
                client.publish("orders", [b"%d" % number for number in range(first, first + 10)])
            self.ids = [str(message.id) for message in client.read("orders")]

    def start(self, *more):
        command = [PLAINSONG, "on", "orders", "--url", self.url, "--pause", "20ms", "--max-pause", "200ms"]
        with open(os.devnull, "wb") as nowhere:
            self.process = start_python(
                *command,
                *self.arguments,
                *more,
                imports=["plainsong.react.command"],
                stdout=nowhere.fileno(),
                stderr=nowhere.fileno(),
            )

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL

    def kill_daemon(self):
        """Kill the daemon while the command works: before the daemon's first answer, the command would rightly exit."""
        before = len(self.happened())
        self.publish(10)
        self.until("an effect of this run", lambda: len(self.happened()) > before)
        port = self.daemon.address[1]
        self.daemon.kill()
        self.daemon = Daemon(self.daemon.data_dir, bind=f"127.0.0.1:{port}").start()

    def happened(self):
        return self.effects.read_text().split()

    def reached(self, count):
        """Wait until ``count`` different messages have had their effect."""
        self.until(f"{count} effects", lambda: len(set(self.happened())) >= count)

    def until(self, what, is_so):
        """Wait for something that the running command does."""

        def has():
            assert self.process.poll() is None, f"the command ended with {self.process.returncode}"
            return is_so()

        eventually(what, has, PATIENCE_S)

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.daemon.end()


@pytest.fixture
def scene(tmp_path):
    """Return a function that makes scenes, which end with the test."""
    scenes = []

    def make(line, *arguments):
        made = Scene(tmp_path, "--shell", "--run", line.format(effects=tmp_path / "effects"), *arguments)
        scenes.append(made)
        return made

    yield make
    for each in scenes:
        each.end()


@pytest.mark.parametrize("where", ["reader:killed", "file"])
def test_nothing_is_skipped_and_repeats_occur_only_where_something_was_killed(scene, tmp_path, where):
    position = where if where.startswith("reader:") else str(tmp_path / "position")
    play = scene("echo $PLAINSONG_MESSAGE_ID >> {effects}", "--position", position)
    chance = random.Random(where)
    for kill in range(KILLS):
        play.start()
        play.reached(MESSAGES * (kill + 1) // (KILLS + 2))
        time.sleep(chance.random() / 50)  # at any point of the command's loop
        if kill == 2:
            play.kill_daemon()
            play.reached(min(len(play.ids), len(set(play.happened())) + 2))
        play.kill()
    play.start("--once")
    assert play.process.wait(PATIENCE_S) == 0
    happened = play.happened()
    assert [message_id for message_id, _ in groupby(happened)] == play.ids
    assert (
        len(happened) - len(play.ids) <= KILLS
    )  # killing the daemon repeats nothing, because the command kept running


def test_dead_letters_are_stored_once_although_everything_is_killed(scene):
    play = scene(f"echo $PLAINSONG_MESSAGE_ID >> {{effects}}; {NEVER}", "--dead-letter", "dead")
    chance = random.Random("dead")
    for kill in range(KILLS):
        play.start()
        play.reached(MESSAGES * (kill + 1) // (KILLS + 2))
        time.sleep(chance.random() / 20)
        if kill == 2:
            play.kill_daemon()
        play.kill()
    play.start("--once")
    assert play.process.wait(PATIENCE_S) == 0
    with Client(play.url) as client:
        letters = [message.attributes["originalId"] for message in client.read("dead")]
    wrong = [each for each in play.ids if each[:20].endswith(("0", "5"))]
    assert len(wrong) >= MESSAGES // 10
    assert letters == wrong
    assert [message_id for message_id, _ in groupby(play.happened())] == play.ids


def test_posts_are_repeated_with_the_same_key(tmp_path):
    """The server drops connections after it has received a message; the retry has the same key, in the right order."""

    class Dropping(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            server.keys.append(self.headers["Idempotency-Key"])
            if len(server.keys) % 3 == 0:
                self.connection.shutdown(2)
                return
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Dropping) as server, Daemon(tmp_path / "data") as daemon:
        server.keys = []
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        with Client(url_of(daemon)) as client:
            client.create_topic("orders")
            client.publish("orders", [b"x"] * 20)
            ids = [f"default:orders:{message.id}" for message in client.read("orders")]
        where = ("--url", url_of(daemon), "--post", f"http://127.0.0.1:{server.server_address[1]}")
        done = subprocess.run(
            [PLAINSONG, "on", "orders", *where, "--once", "--pause", "2ms"],
            env={**clean_environ(), "PYTHONWARNINGS": "error"},
            timeout=PATIENCE_S,
            check=False,
        )
        server.shutdown()
        thread.join()
        assert done.returncode == 0
        assert [key for key, _ in groupby(server.keys)] == ids
        assert len(server.keys) == len(ids) + len(server.keys) // 3
