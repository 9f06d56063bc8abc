"""Runs every Python block of docs/walkthrough.md in order, as a notebook would, and saves the pictures.

    make serve                                                       # in another terminal
    .venv/bin/python examples/spark/walkthrough.py                   # pictures in docs/pictures
    .venv/bin/python examples/spark/walkthrough.py --pictures there --url http://127.0.0.1:7420

Prints each block with its output. Checkpoints are in a temporary folder, so you can run it again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark_plainsong.pipeline.session import worker_environ

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "walkthrough.md"
DEFAULT_URL = "http://127.0.0.1:7420"
_FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of the page."""

    code: str
    shown: str
    """The output that the page shows; empty if it shows none."""
    line: int
    """Its line in the page."""


def blocks_of(page: str) -> list[Block]:
    """Return the Python blocks of the page, each with the text block that follows it."""
    found: list[Block] = []
    for fence in _FENCE.finditer(page):
        if fence[1] == "python":
            found.append(Block(fence[2], "", page.count("\n", 0, fence.start()) + 1))
        elif found:
            found[-1] = found[-1]._replace(shown=fence[2])
    return found


def run_blocks(url: str) -> Iterator[tuple[Block, str]]:
    """Run the blocks in the current folder, in one namespace; yield each with its output."""
    names: dict[str, Any] = {"__name__": "__walkthrough__"}
    for block in blocks_of(PAGE.read_text(encoding="utf-8")):
        said = io.StringIO()
        # Make line numbers in tracebacks those of the page.
        code = compile("\n" * block.line + block.code.replace(DEFAULT_URL, url), str(PAGE), "exec")
        with contextlib.redirect_stdout(said):
            exec(code, names)  # noqa: S102 - running the page is what this is for
        yield block, said.getvalue()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--url", default=os.environ.get("PLAINSONG_URL", DEFAULT_URL), help="of the daemon")
    arguments.add_argument("--pictures", type=Path, default=PAGE.parent / "pictures", help="where they go")
    given = arguments.parse_args()
    os.environ.update(worker_environ())  # from a checkout Spark would not find the data source by itself
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    pictures = given.pictures.absolute()
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block, said in run_blocks(given.url):
            print(block.code.rstrip(), said, sep="\n\n")
        for picture in sorted(Path("pictures").iterdir()):
            shutil.copyfile(picture, pictures / picture.name)
            print(pictures / picture.name)


if __name__ == "__main__":
    main()
