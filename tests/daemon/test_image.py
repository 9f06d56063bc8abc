"""The image itself: built by etc/Containerfile from the wheels of this tree, started, and published to.

It needs root, buildah, a package index, and a base: ``PLAINSONG_IMAGE_BASE`` is the name of an image, or a tar file of
a root file system with Debian's layout and Python, as made by debootstrap.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.daemon.harness import ROOT, clean_environ, eventually
from tests.patience import PATIENCE_S

BASE = os.environ.get("PLAINSONG_IMAGE_BASE", "")
#: Most of the time to build and start an image is spent in other programs.
BUILD_PATIENCE_S = 20 * PATIENCE_S

pytestmark = [
    pytest.mark.skipif(shutil.which("buildah") is None, reason="NOT TESTED: the image, since buildah is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: the image, which only root builds and starts here"),
    pytest.mark.skipif(not BASE, reason="NOT TESTED: the image, since PLAINSONG_IMAGE_BASE names no base"),
]


@dataclass(frozen=True)
class Builder:
    """buildah, with a storage of its own."""

    place: Path

    def line(self, *words: object) -> list[str]:
        storage = ["--root", str(self.place / "storage"), "--runroot", str(self.place / "run")]
        return ["buildah", *storage, "--storage-driver", "vfs", *map(str, words)]

    def run(self, *words: object, code: int = 0) -> str:
        """Run a command, and return its output."""
        done = subprocess.run(
            self.line(*words),
            capture_output=True,
            text=True,
            check=False,
            timeout=BUILD_PATIENCE_S,
            env=clean_environ(),
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout.strip()

    def base(self) -> str:
        """Return the name of the image that the build starts from."""
        if not os.path.isfile(BASE):
            return BASE
        container = self.run("from", "scratch")
        self.run("add", container, BASE, "/")
        self.run("commit", "--rm", container, "localhost/base")
        return "localhost/base"


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    # A short path, for its Unix socket.
    with tempfile.TemporaryDirectory(prefix="psi", ignore_cleanup_errors=True) as folder:
        builder = Builder(Path(folder))
        yield builder
        builder.run("rm", "--all")
        builder.run("rmi", "--all", "--force")


@pytest.fixture(scope="module")
def image(builder: Builder, wheels: dict[str, Path]) -> str:
    context = builder.place / "context"
    (context / "dist").mkdir(parents=True)
    shutil.copy(ROOT / "requirements.lock", context)
    for wheel in wheels.values():
        shutil.copy(wheel, context / "dist")
    builder.run(
        *("build", "--isolation", "chroot", "--format", "docker", "--file", ROOT / "etc/Containerfile"),
        *("--build-arg", f"BASE={builder.base()}", "--tag", "localhost/plainsong", context),
    )
    return "localhost/plainsong"


def config_of(builder: Builder, image: str) -> dict[str, Any]:
    return dict(json.loads(builder.run("inspect", "--type", "image", image))["Docker"]["config"])


def program_below(pid: int) -> int:
    """Return the pid of the container's program: the last in the chain of processes that buildah starts."""
    while True:
        below = [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
        if not below:
            return pid
        (pid,) = below


def test_the_image_starts_without_root_accepts_a_publish_and_stops_cleanly(builder: Builder, image: str) -> None:
    config = config_of(builder, image)
    assert (config["User"], config["StopSignal"], list(config["Volumes"])) == ("10001:10001", "SIGTERM", ["/data"])
    container = builder.run("from", image)
    running = ["run", "--isolation", "chroot"]
    said = builder.place / "said"

    # The image does not start until insecure settings are allowed explicitly.
    program = [*config["Entrypoint"], *config["Cmd"]]
    builder.run(*running, container, "--", *program, code=Exit.USAGE)

    # The network is this machine's, so use any free port.
    settings = ["PLAINSONG_SECURITY__ALLOW_INSECURE=authentication,tls"]
    settings += ["PLAINSONG_HTTP__BIND=0.0.0.0:0,unix:/data/plainsong.sock"]
    environ = [word for each in settings for word in ("--env", each)]
    with said.open("wb") as log:
        daemon = subprocess.Popen(
            builder.line(*running, *environ, container, "--", *program),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=clean_environ(),
            start_new_session=True,
        )
    try:
        eventually("it serves or ends", lambda: '"serving"' in said.read_text() or daemon.poll() is not None)
        assert daemon.poll() is None, said.read_text()
        _, *health = config["Healthcheck"]["Test"]
        assert builder.run(*running, container, "--", *health).endswith("alive")
        (serving,) = [line for line in said.read_text().splitlines() if '"serving"' in line]
        port = json.loads(serving)["addresses"][0].rsplit(":", 1)[1]
        with Client(f"http://127.0.0.1:{port}") as client:
            client.create_topic("orders")
            with client.transaction():
                client.publish("orders", [b"one", b"two"])
            assert [message.payload for message in client.read("orders")] == [b"one", b"two"]
        # Not buildah: it does not forward signals, and takes its program with it.
        os.kill(program_below(daemon.pid), signal.SIGTERM)
        assert daemon.wait(PATIENCE_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(PATIENCE_S)
    assert '"stopped"' in said.read_text()
