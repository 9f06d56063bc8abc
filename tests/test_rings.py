"""``make test`` runs every test, adds up the results, and prints how to run a failed ring alone."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tests import rings
from tests.rings import Ring, Runner, all_rings, cores_idle_s, free_bytes, judge


def test_every_test_file_belongs_to_one_ring():
    names = [ring.name for ring in all_rings()]
    assert len(set(names)) == len(names)
    whole = [path.removeprefix("tests/") for ring in all_rings() if not ring.folder for path in ring.paths]
    assert {path.relative_to(rings.TESTS).parts[0] for path in rings.TESTS.rglob("test_*.py")} == set(whole)
    assert len(whole) == len(set(whole))


def test_a_file_that_a_ring_takes_out_of_a_folder_is_run_by_it_alone():
    divided = [ring for ring in all_rings() if ring.folder]
    assert divided
    taken = Counter(path for ring in divided for path in ring.paths)
    assert set(taken.values()) == {1}
    for ring in divided:
        (rest,) = [each for each in all_rings() if each.name == ring.folder]
        assert all((rings.ROOT / path).is_file() for path in ring.paths)
        assert {f"--ignore={path}" for path in ring.paths} <= set(rest.left_out)
        assert rest.paths == [f"tests/{ring.folder}"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with three rings, as the runner's root."""
    (tmp_path / "tests").mkdir()
    for name, lines in {
        "good": "def test_a(): pass\ndef test_b(): pytest.skip('not today')",
        "bad": "@pytest.fixture\ndef f():\n    yield\n    raise OSError\ndef test_a(f): pass\ndef test_b(): assert False",
        "empty": "",
    }.items():
        (tmp_path / f"tests/test_{name}.py").write_text(f"import pytest\n{lines}\n")
    monkeypatch.setattr(rings, "ROOT", tmp_path)
    monkeypatch.setattr(rings, "OUTPUT", tmp_path)
    # The runner needs only pytest itself; loading the installed plugins took most of each start.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(*names: str) -> tuple[int, list[str]]:
    some = [Ring(name, 1, 1) for name in names]
    runner = Runner(some, 2, ["-q"])
    runner.run()
    return judge(runner.ended, some), [run.ring.name for run in runner.ended]


def test_a_failed_test_is_named_with_the_command_that_runs_it_alone(tree, capsys):
    code, ended = run("test_good.py", "test_bad.py", "test_empty.py")
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert sorted(ended) == ["test_bad.py", "test_empty.py", "test_good.py"]
    assert lines[-1] == "1 passed, 3 failed, 1 skipped"
    assert "failed in test_bad.py (alone: .venv/bin/python -m pytest tests/test_bad.py):" in lines
    assert "  tests.test_bad::test_b" in lines
    assert "  test_empty.py ended with 5" in lines


def test_a_run_without_failures_is_a_success(tree, capsys):
    assert run("test_good.py") == (0, ["test_good.py"])
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 1 skipped"


PASSES_ONCE_ITS_NOTE_IS_THERE = """
from pathlib import Path

note = Path("note")

def test_it():
    was_there = note.exists()
    note.touch()
    assert was_there

def test_another():
    note.with_name("others").open("a").write("ran ")
"""


def looked_at_twice(tmp_path, *rings_: Ring) -> int:
    for ring in rings_:
        (tmp_path / "tests" / ring.name).write_text(PASSES_ONCE_ITS_NOTE_IS_THERE.replace("note", ring.name[5:-3]))
    runner = Runner(rings_, 1, ["-q"])
    runner.run()
    runner.look_again()
    return judge(runner.ended, rings_)


def test_a_test_that_fails_among_others_and_passes_alone_is_unstable_and_not_a_failure(tree, tmp_path, capsys):
    assert looked_at_twice(tmp_path, Ring("test_note.py", 1, 1)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"
    assert any(line.startswith("UNSTABLE in test_note.py, to be repaired") for line in lines)
    assert "  tests.test_note::test_it" in lines
    assert "assert was_there" in (tmp_path / "test_note.py.first.txt").read_text()
    assert (tmp_path / "others").read_text() == "ran "  # the second run has only the failed test


def test_a_test_that_fails_twice_has_failed(tree, capsys):
    some = [Ring("test_bad.py", 1, 1)]
    runner = Runner(some, 1, ["-q"])
    runner.run()
    runner.look_again()
    assert judge(runner.ended, some) == 1
    assert "UNSTABLE" not in capsys.readouterr().out


def test_a_ring_that_cannot_run_is_not_unstable(tree):
    some = [Ring("test_empty.py", 1, 1)]
    runner = Runner(some, 1, ["-q"])
    runner.run()
    runner.look_again()
    assert judge(runner.ended, some) == 1


def test_failures_of_many_rings_are_final(tree, tmp_path):
    names = [f"test_{name}.py" for name in ("first", "second", "third")]
    assert looked_at_twice(tmp_path, *(Ring(name, 1, 1) for name in names)) == 1


def test_failures_of_a_ring_that_may_not_depend_on_luck_are_final(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(rings, "NEVER_BY_LUCK", {"test_note.py"})
    assert looked_at_twice(tmp_path, Ring("test_note.py", 1, 1)) == 1


def test_the_rings_that_may_not_depend_on_luck_are_rings():
    assert {ring.name for ring in all_rings()} >= rings.NEVER_BY_LUCK


MEETING = """
import time
from pathlib import Path

def note(what):
    with Path("log").open("a") as log:
        log.write(what)

def test_it():
    note("begun ")
    deadline_s = time.monotonic() + {patience_s}
    while Path("log").read_text().count("begun") < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    note("ended ")
"""


@pytest.mark.parametrize(
    ("idle_cores", "free", "patience_s", "order"),
    [
        pytest.param(1, rings.ROOM_BYTES, 60, "begun begun", id="it waits"),
        pytest.param(0, rings.ROOM_BYTES, 1, "begun ended", id="it computes"),
        pytest.param(1, rings.ROOM_BYTES - 1, 1, "begun ended", id="no memory"),
    ],
)
def test_a_further_ring_starts_while_another_waits_and_memory_is_free(
    tree, tmp_path, monkeypatch, idle_cores, free, patience_s, order
):
    monkeypatch.setattr(rings, "IDLE_FOR_S", 0.1)
    some = [Ring(f"test_{name}.py", 1, 1) for name in ("first", "second")]
    for ring in some:
        (tmp_path / "tests" / ring.name).write_text(MEETING.format(patience_s=patience_s))
    runner = Runner(some, 1, ["-q"], most=2, idle_s=lambda: idle_cores * time.monotonic(), free=lambda: free)
    runner.run()
    assert judge(runner.ended, some) == 0
    assert (tmp_path / "log").read_text().startswith(order)


def test_the_number_of_concurrent_rings_is_bounded(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(rings, "IDLE_FOR_S", 0.0)
    some = [Ring(f"test_{name}.py", 1, 1) for name in ("first", "second")]
    for ring in some:
        (tmp_path / "tests" / ring.name).write_text(MEETING.format(patience_s=1))
    runner = Runner(some, 1, ["-q"], most=1, idle_s=time.monotonic)
    runner.run()
    assert judge(runner.ended, some) == 0
    assert (tmp_path / "log").read_text().startswith("begun ended")


def test_the_idle_time_of_cores_is_what_the_system_reports_for_each():
    each_s = [cores_idle_s({core}) for core in range(os.cpu_count() or 1)]
    assert all(idle_s > 0.0 for idle_s in each_s)
    # If no core was idle in between, both times are equal except for rounding.
    assert cores_idle_s(set(range(len(each_s)))) >= sum(each_s) - 0.001
    assert cores_idle_s(set()) == 0.0


def test_the_free_memory_is_what_the_system_reports():
    assert 0 < free_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
