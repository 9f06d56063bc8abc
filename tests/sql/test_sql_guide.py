"""The examples of docs/sql.md, run as they stand, one after the other, against a real daemon and a real PostgreSQL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from plainsong import Client
from tests.daemon.harness import PATIENCE_S, ROOT, Daemon
from tests.documents import DOCUMENTS

GUIDE = DOCUMENTS["docs/sql.md"]
DATABASE = "postgresql+psycopg://shop@127.0.0.1:5432/shop"


def test_the_examples_of_the_guide_do_what_they_show(
    database: str, look: Callable[[], tuple[list[int], list[str]]], tmp_path: Path
):
    examples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(examples) == 3
    assert DATABASE in examples[0]
    code = "\n".join(examples).replace(DATABASE, database).replace("Client()", "Client.from_environment()")
    code += "\nengine.dispose()\n"
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
            for topic in ("orders", "paid"):
                (message,) = client.read(topic, isolation="committed")
                assert message.payload == b'{"order": 17}'
    assert look() == ([17], [])
