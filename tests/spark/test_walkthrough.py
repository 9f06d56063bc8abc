"""docs/walkthrough.md, run block by block against a real daemon: it prints what it shows, and makes its pictures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from codeop import compile_command
from pathlib import Path
from xml.etree import ElementTree

from tests.daemon.harness import Daemon

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "spark" / "walkthrough.py"


def script():
    spec = importlib.util.spec_from_file_location("walkthrough", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_walk_through_prints_what_it_shows_and_makes_its_pictures(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    with Daemon(tmp_path / "data") as daemon:
        for block, printed in script().run_blocks("http://{}:{}".format(*daemon.address)):
            said.append(printed)
            lines = [line.rstrip() for line in printed.strip().splitlines()]
            assert lines == [line.rstrip() for line in block.shown.strip().splitlines()], f"line {block.line}"
    assert len(said) > 10
    shown = re.findall(r"\]\((pictures/[^)]+)\)", script().PAGE.read_text())
    assert sorted(shown) == sorted(f"pictures/{name}" for name in os.listdir("pictures"))
    for picture in shown:
        assert len(list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}path"))) > 20
        assert (ROOT / "docs" / picture).stat().st_size > 5_000


def test_every_block_of_the_page_is_found_and_follows_its_text():
    page = script().PAGE.read_text()
    blocks = script().blocks_of(page)
    assert len(blocks) == page.count("```python")
    assert sum(bool(block.shown) for block in blocks) == page.count("```text")
    for block in blocks:
        assert page.splitlines()[block.line] == block.code.splitlines()[0]


def test_every_block_can_be_pasted_into_an_interactive_python():
    for block in script().blocks_of(script().PAGE.read_text()):
        entered = ""
        for line in [*block.code.splitlines(), ""]:
            # Raises SyntaxError where the prompt would: before Python 3.13 it ends an indented block at an empty line only.
            complete = compile_command(f"{entered}{line}", "<stdin>", "single")
            entered = "" if complete else f"{entered}{line}\n"
        assert not entered, f"line {block.line}"


def test_the_script_explains_itself():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "docs/walkthrough.md" in done.stdout
