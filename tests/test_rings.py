"""``make test`` runs every test there is, sums up, and says how to run alone what failed."""

from __future__ import annotations

import pytest

from tests import rings
from tests.rings import Ring, Runner, all_rings, judge


def test_every_test_file_belongs_to_one_ring():
    names = [ring.name for ring in all_rings()]
    assert len(set(names)) == len(names)
    assert {path.relative_to(rings.TESTS).parts[0] for path in rings.TESTS.rglob("test_*.py")} == set(names)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with three rings, in which the runner works."""
    (tmp_path / "tests").mkdir()
    for name, lines in {
        "good": "def test_a(): pass\ndef test_b(): pytest.skip('not today')",
        "bad": "@pytest.fixture\ndef f():\n    yield\n    raise OSError\ndef test_a(f): pass\ndef test_b(): assert False",
        "empty": "",
    }.items():
        (tmp_path / f"tests/test_{name}.py").write_text(f"import pytest\n{lines}\n")
    monkeypatch.setattr(rings, "ROOT", tmp_path)
    monkeypatch.setattr(rings, "OUTPUT", tmp_path)


def run(*names: str) -> tuple[int, list[str]]:
    some = [Ring(name, 1, 1) for name in names]
    runner = Runner(some, 2, ["-q"])
    runner.run()
    return judge(runner.ended, some), [run.ring.name for run in runner.ended]


def test_what_failed_is_named_with_the_command_that_runs_it_alone(tree, capsys):
    code, ended = run("test_good.py", "test_bad.py", "test_empty.py")
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert sorted(ended) == ["test_bad.py", "test_empty.py", "test_good.py"]
    assert lines[-1] == "1 passed, 3 failed, 1 skipped"
    assert "failed in test_bad.py (alone: .venv/bin/python -m pytest tests/test_bad.py):" in lines
    assert "  tests.test_bad::test_b" in lines
    assert "  test_empty.py ended with 5" in lines


def test_all_is_well(tree, capsys):
    assert run("test_good.py") == (0, ["test_good.py"])
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 1 skipped"
