"""The examples of docs/sql.md, run unchanged and in order, with a real daemon and a real PostgreSQL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from plainsong import Client
from tests.daemon.harness import ROOT, Daemon
from tests.documents import DOCUMENTS
from tests.patience import PATIENCE_S

GUIDE = DOCUMENTS["docs/sql.md"]
DATABASE = "postgresql+psycopg://shop@127.0.0.1:5432/shop"
FILE = "sqlite:////var/lib/shop/shop.db"


def test_the_examples_of_the_guide_do_what_they_show(
    database: str, look: Callable[[], tuple[list[int], list[str]]], tmp_path: Path
):
    examples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(examples) == 4
    assert DATABASE in examples[0]
    assert FILE in examples[3]
    code = "\nengine.dispose()\n".join([*examples, ""]).replace("Client()", "Client.from_environment()")
    code = code.replace(DATABASE, database).replace(FILE, f"sqlite:///{tmp_path}/shop.db")
    with Daemon(tmp_path / "data") as daemon:
        url = f"http://{daemon.address[0]}:{daemon.address[1]}"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**os.environ, "PLAINSONG_URL": url, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        with Client(url) as client:
            for topic, orders in (("orders", (17, 18)), ("paid", (17,))):
                payloads = [message.payload for message in client.read(topic, isolation="committed")]
                assert payloads == [b'{"order": %d}' % order for order in orders]
    assert look() == ([17], [])
