"""A program that gunicorn loads before it forks its workers: they share a Client and a publisher made by its parent."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from plainsong import Client
from tests.daemon.harness import ROOT, eventually
from tests.patience import PATIENCE_S

WORKERS = 3
#: Before the fork the client has an open connection, and the publisher a thread, a message sent and one that waits.
PROGRAM = """
import os
from plainsong import Client

client = Client(os.environ["DAEMON"], deadline_s=180)
topic = os.environ["TOPIC"]
client.publish(topic, b"preloaded")
publisher = client.publisher(topic, linger_ms=0)
publisher.send(b"preloaded and sent").result()
waiting = client.publisher(topic, linger_ms=3_600_000)
waiting.send(b"preloaded and waiting")


def application(environ, start_response):
    client.publish(topic, b"request")
    publisher.send(b"request and sent").result()
    waiting.send(b"request and waiting")
    read = sum(1 for message in client.read(topic) if message.payload == b"request")
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(read).encode()]
"""
#: Each worker uses them before it accepts a request.
SETTINGS = """
def post_worker_init(worker):
    import program

    program.client.publish(program.topic, b"worker")
    program.publisher.send(b"worker and sent").result()
    program.waiting.send(b"worker and waiting")
    assert program.client.poll(program.topic)
"""


def test_workers_that_gunicorn_forks_publish_and_read_by_a_client_that_was_made_before(
    client: Client, topic: str, shared_url: str, tmp_path: Path
):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "settings.py").write_text(SETTINGS)

    def stored() -> Counter[bytes]:
        return Counter(message.payload for message in client.read(topic))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", str(WORKERS), "--timeout", "0"]
        command += ["--graceful-timeout", str(int(PATIENCE_S)), "--config", "settings.py"]
        gunicorn = subprocess.Popen(
            [*command, "--bind", f"fd://{listener.fileno()}", "program:application"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DAEMON": shared_url, "TOPIC": topic},
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            eventually("each worker has published", lambda: stored()[b"worker and sent"] == WORKERS or gunicorn.poll())
            for number in range(1, 3 * WORKERS + 1):
                web = http.client.HTTPConnection(*listener.getsockname(), timeout=PATIENCE_S)
                web.request("GET", "/")
                answer = web.getresponse()
                assert (answer.status, answer.read()) == (200, b"%d" % number)
                web.close()
            gunicorn.send_signal(signal.SIGTERM)
            said = gunicorn.communicate(timeout=PATIENCE_S)[1]
        finally:
            gunicorn.kill()
    assert (gunicorn.returncode, "Traceback" in said, "not sent" in said) == (0, False, False), said
    assert stored() == {
        b"preloaded": 1,
        b"preloaded and sent": 1,
        b"preloaded and waiting": 1,
        **{b"worker" + how: WORKERS for how in (b"", b" and sent", b" and waiting")},
        **{b"request" + how: 3 * WORKERS for how in (b"", b" and sent", b" and waiting")},
    }
