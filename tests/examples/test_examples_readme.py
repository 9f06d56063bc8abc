"""The examples' README: its commands work, and print the output that it shows."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.documents import anchors, links
from tests.examples.programs import EXAMPLES, run_program

README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
#: Each block of command lines, with the block of their output.
BLOCKS = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def without_chance(said: str) -> list[str]:
    """Return the lines, sorted, without ids and times: parallel programs print in any order."""
    said = re.sub(r"\b[0-9a-f]{20,40}\b", "ID", said)
    said = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:.+]+", "TIME", said)
    return sorted(re.sub(r"\brun-\d{8}-\d{6}\b", "RUN", said).splitlines())


@pytest.mark.parametrize(("lines", "told"), BLOCKS, ids=[shlex.split(lines)[1] for lines, _ in BLOCKS])
def test_the_page_shows_the_output_of_the_examples(lines: str, told: str, url: str, tmp_path: Path):
    said = ""
    for line in lines.splitlines():
        interpreter, program, *words = shlex.split(line)
        assert (interpreter, Path(program).parent) == (".venv/bin/python", Path("examples"))
        said += run_program(Path(program).stem, url, *words, TMPDIR=str(tmp_path))
    assert without_chance(said) == without_chance(told)


def test_the_page_names_every_example_and_its_links_resolve():
    found = links(README)
    assert {f"{name}.py" for name in NAMES} <= set(found)
    for link in found:
        path, _, anchor = link.partition("#")
        target = EXAMPLES / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", NAMES)
def test_every_example_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"\(use case \d\)\.$", said, re.MULTILINE)
    assert f"    {name}.py" in said
    assert "--url" in said
