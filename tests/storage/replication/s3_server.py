"""A real S3 server: versitygw, over a folder, on the loopback interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = Path(__file__).parents[3] / ".cache/tools"
BUCKET = "copies"
ACCESS, SECRET = "plainsong", "a-secret-of-the-tests"


def s3_program() -> str | None:
    """Return the server's program; None if it is not installed."""
    return shutil.which("versitygw", path=f"{TOOLS}:/usr/local/bin:/usr/bin") or shutil.which("versitygw")


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server with one bucket, ``BUCKET``; yield the environment that leads to it. Skips the test without one."""
    with s3_process(folder) as (environment, _):
        yield environment


def _has_attributes(folder: Path) -> bool:
    """True if the file system stores extended attributes."""
    try:
        os.setxattr(folder, "user.plainsong", b"1")
    except OSError:
        return False
    return True


@contextmanager
def s3_process(folder: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Like ``s3_server``, but yield the process too, for tests that freeze it."""
    program = s3_program()
    if program is None:
        pytest.skip(
            "NOT TESTED: versitygw, an S3 server, is not installed here; etc/tools fetches it where there is Go"
        )
    data, meta = folder / "data", folder / "meta"
    (data / BUCKET).mkdir(parents=True)
    meta.mkdir()
    (port,) = free_ports(1)
    # With attributes in files of their own, a read may return the contents of one version and the ETag of another, and
    # conditional replacements are lost.
    attributes: list[str | Path] = [] if _has_attributes(data) else ["--sidecar", meta]
    command: list[str | Path] = [program, "--port", f"127.0.0.1:{port}", "posix", *attributes, data]
    environment = {"ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET, "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE_S
        while not answers(port):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, "the S3 server does not listen"
        found = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
        }
        yield found, server
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
            return True
    except ConnectionRefusedError:
        return False
