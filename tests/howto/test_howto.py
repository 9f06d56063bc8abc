"""Every how-to page works: its programs and commands run from top to bottom, and print the output that the page shows.

A page may contain these blocks:

* ``python``: a program. One whose first line is ``# name.py`` is saved to that file, and runs where a command line
  names it, or in place if none does. ``javascript`` is the same for ``// name.mjs`` and ``go`` for ``// name.go``,
  which always need a command line.
* ``toml`` whose first line is ``# name.toml`` is saved to that file.
* ``sh``: lines for a shell, run unchanged in the page's own directory, with the page's own daemon. A line that begins
  with ``plainsong serve`` starts another daemon, at the page's second address, which runs until the page's end; other
  test rings run lines that begin with ``make``.
* ``text`` right after one of these: lines of its output, in this order; ``…`` matches anything.
* ``text`` elsewhere, such as lines for another machine, is not tested.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.daemon.harness import PLAINSONG, Daemon, clean_environ, eventually, free_port
from tests.documents import DOCUMENTS, ROOT, blocks
from tests.spark_session import spark_environ, why_not

PAGES = {name: text for name, text in DOCUMENTS.items() if name.startswith("docs/howto/")}
URL = "http://127.0.0.1:7420"
#: The address of a daemon that the page itself starts.
SECOND = "127.0.0.1:7430"
DATABASE = "postgresql+psycopg://shop@127.0.0.1:5432/shop"
#: Far longer than a page's program takes; one with Spark takes half a minute on a busy machine.
PATIENCE_S = 900
#: Loads the fixtures, which a user's pytest finds through the client distribution's entry point.
PLUGIN = ("python -m pytest ", "python -m pytest -p plainsong.testing.plugin ")


@cache
def go_environ() -> dict[str, str]:
    """Return the setting that makes Go use this machine's build cache.

    In a page's own HOME, Go would compile its whole standard library again, for half a minute.
    """
    if shutil.which("go") is None:
        return {}
    done = subprocess.run(["go", "env", "GOCACHE"], capture_output=True, text=True, check=True)
    return {"GOCACHE": done.stdout.strip()}


class Page:
    """A directory and a daemon for the blocks of one page."""

    def __init__(self, home: Path, url: str, database: str) -> None:
        self.home, self._url, self._database = home, url, database
        self._second = f"127.0.0.1:{free_port()}"
        self._started: list[subprocess.Popen[bytes]] = []
        (home / "etc").symlink_to(ROOT / "etc")
        self._environ = {
            **clean_environ(),
            **spark_environ(),
            **go_environ(),
            "PLAINSONG_URL": url,
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "settings"),
            "PATH": f"{PLAINSONG.parent}:{os.environ['PATH']}",
        }

    def _here(self, code: str) -> str:
        """Return ``code`` with this test's addresses in place of the usual ones."""
        return code.replace(URL, self._url).replace(SECOND, self._second).replace(DATABASE, self._database)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environ, cwd=self.home, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, (command[-1], done.returncode, done.stdout, done.stderr)
        return done.stdout

    def save(self, name: str, code: str) -> None:
        """Save a program, with this test's addresses in place of the usual and the default ones."""
        (self.home / name).write_text(self._here(code).replace("Client()", "Client.from_environment()"))

    def program(self, name: str) -> str:
        return self._run(sys.executable, "-W", "error", name)

    def shell(self, lines: str) -> str:
        kept = [line for line in self._here(lines).splitlines() if not line.startswith("make ")]
        if kept and kept[0].startswith("plainsong serve "):
            self._serve(kept.pop(0))
        return self._run("/bin/bash", "-e", "-o", "pipefail", "-c", "\n".join(kept).replace(*PLUGIN)) if kept else ""

    def _serve(self, line: str) -> None:
        log = self.home / "serve.log"
        with log.open("wb") as output:
            started = subprocess.Popen(
                shlex.split(line), env=self._environ, cwd=self.home, stdout=output, stderr=subprocess.STDOUT
            )
        self._started.append(started)
        eventually(f"{line} listens", lambda: started.poll() is not None or b" listens on " in log.read_bytes())
        assert started.poll() is None, log.read_text()

    def close(self) -> None:
        """End the daemons that the page started."""
        for started in self._started:
            started.kill()
            started.wait()


@pytest.fixture
def page(tmp_path: Path, request: pytest.FixtureRequest, wanted: str) -> Iterator[Page]:
    database = request.getfixturevalue("database") if DATABASE in wanted else ""
    if ("SparkSession" in wanted or "plainsong pipeline run" in wanted) and (reason := why_not()):
        pytest.skip(f"NOT TESTED, a page with Spark: {reason}")
    if "\nnode " in wanted and shutil.which("node") is None:
        pytest.skip("NOT TESTED, a page with JavaScript: there is no node")
    if "\ngo run" in wanted and shutil.which("go") is None:
        pytest.skip("NOT TESTED, a page with Go: there is no go")
    daemon: Callable[[Path], Daemon] = request.getfixturevalue("daemon")
    running = daemon(tmp_path / "data")
    home = tmp_path / "home"
    home.mkdir()
    here = Page(home, "http://{}:{}".format(*running.address), database)
    yield here
    here.close()


@pytest.mark.parametrize("wanted", PAGES.values(), ids=PAGES)
def test_a_page_works_as_written(wanted: str, page: Page):
    shell = "\n".join(block.body for block in blocks(wanted) if block.info == "sh")
    output, end = "", 0
    for block in blocks(wanted):
        if block.info == "python":
            named = re.match(r"# (\w+\.py)\n", block.body)
            name = named[1] if named else "unnamed.py"
            page.save(name, block.body)
            output = "" if name in shell else page.program(name)
        elif block.info == "toml" and (named := re.match(r"# ([\w.-]+\.toml)\n", block.body)):
            page.save(named[1], block.body)
            output = ""
        elif block.info == "javascript":
            name = re.match(r"// (\w+\.mjs)\n", block.body)[1]  # type: ignore[index]
            assert f"node {name}" in shell
            page.save(name, block.body)
            output = ""
        elif block.info == "go":
            name = re.match(r"// (\w+\.go)\n", block.body)[1]  # type: ignore[index]
            assert f"go run {name}" in shell
            page.save(name, block.body)
            output = ""
        elif block.info == "sh":
            output = page.shell(block.body)
        elif block.info == "text" and not wanted[end : block.start].strip() and end:
            assert_printed(block.body.splitlines(), output)
            continue
        else:
            continue
        end = block.end


def assert_printed(shown: list[str], output: str) -> None:
    """Check that the output contains the lines shown, in this order."""
    printed = iter(output.splitlines())
    for line in shown:
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        assert any(pattern.fullmatch(each.rstrip()) for each in printed), (line, output)


def test_every_page_is_in_the_list_of_pages():
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", PAGES["docs/howto/index.md"]))
    assert listed | {"index.md"} == {Path(name).name for name in PAGES}


def test_a_line_that_was_not_printed_is_noticed():
    with pytest.raises(AssertionError):
        assert_printed(["second", "first"], "first\nsecond\n")
    with pytest.raises(AssertionError):
        assert_printed(["fir"], "first\n")
    assert_printed(["f…t", "second"], "first\nother\nsecond\n")


@pytest.mark.skipif(shutil.which("postgres") is None, reason="NOT TESTED: no PostgreSQL")
def test_the_first_program_of_the_readme_keeps_row_and_message_together(
    database: str, look: Callable[[], tuple[list[int], list[str]]], daemon: Callable[[Path], Daemon], tmp_path: Path
):
    running = daemon(tmp_path / "data")
    home = tmp_path / "home"
    home.mkdir()
    here = Page(home, "http://{}:{}".format(*running.address), database)
    here.save("first.py", next(block.body for block in blocks(DOCUMENTS["README.md"]) if block.info == "python"))
    here.program("first.py")
    assert look() == ([17], [])
    assert here.shell("plainsong poll orders") == '{"order": 17}\n'
