"""``etc/venv``, which a new contributor runs first: it reports errors and repeats no work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path):
    """A tree with the files that etc/venv reads, and no environment."""
    (tmp_path / "etc").mkdir()
    shutil.copy(ROOT / "etc/venv", tmp_path / "etc/venv")
    for path in [*ROOT.glob("requirements*.lock"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def venv(tree: Path, profile: str, python: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", tree / "etc/venv", profile],
        env={"PATH": "/usr/bin:/bin", "PYTHON": python, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def interpreter(tree: Path, *without: str) -> str:
    """Return a Python without the modules of these names."""
    path = tree / "python-without"
    refusals = "".join(f'case "$*" in *import*{name}*) exit 1;; esac\n' for name in without)
    path.write_text(f'#!/bin/bash\n{refusals}exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_missing_python_is_one_error_that_names_what_to_install(tree):
    code, out, error = venv(tree, "run", "/nowhere/python3")
    assert (code, out) == (1, "")
    assert error.startswith("error: no Python 3.11 or later was found\nhint: install it")


def test_a_python_that_cannot_install_anything_says_which_package_is_missing(tree):
    code, out, error = venv(tree, "run", interpreter(tree, "ensurepip", "pip"))
    assert (code, out) == (1, "")
    assert "hint: Debian and Ubuntu: apt-get install python3-venv" in error
    assert not (tree / ".venv").exists()


def test_a_python_for_which_plyvel_is_compiled_prints_the_requirements_before_anything_is_made(tree):
    path = tree / "python-later"
    path.write_text(f'#!/bin/bash\ncase "$*" in *"(3, 13)"*) exit 0;; esac\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    code, out, error = venv(tree, "run", str(path), CXX="false")
    assert (code, out) == (1, "")
    assert error.startswith("error: plyvel has no wheel for Python 3.")
    assert "hint: Debian and Ubuntu: apt-get install g++ libleveldb-dev python3-dev" in error
    assert not (tree / ".venv").exists()


def test_a_directory_that_is_not_an_environment_is_left_alone(tree):
    (tree / ".venv").mkdir()
    (tree / ".venv/mine").touch()
    code, _, error = venv(tree, "run", sys.executable)
    assert code == 1
    assert "no virtual environment" in error
    assert (tree / ".venv/mine").exists()


def test_installed_packages_are_not_installed_again_until_a_lock_changes(tree):
    (tree / ".venv/bin").mkdir(parents=True)
    for name in ("python", "plainsong"):
        (tree / ".venv/bin" / name).symlink_to("/bin/true")
    locks = {"run": "requirements.lock", "dev": "requirements-dev.lock", "bench": "requirements-bench.lock"}
    for profile, lock in locks.items():
        stamp = subprocess.run(
            ["bash", "-c", f"{{ pwd; cat pyproject.toml {lock}; }} | cksum"], cwd=tree, capture_output=True, check=True
        ).stdout
        (tree / f".venv/.installed-{profile}").write_bytes(stamp)
        assert venv(tree, profile, "/nowhere/python3") == (0, "", "")
    (tree / ".venv/.installed-run").unlink()
    assert venv(tree, "run", "/nowhere/python3")[0] == 0, "dev contains run"
    with (tree / "requirements-dev.lock").open("a") as lock:
        lock.write("# changed\n")
    assert venv(tree, "dev", "/nowhere/python3")[0] == 1
    assert venv(tree, "run", "/nowhere/python3")[0] == 1


@pytest.mark.skipif(not Path("/usr/bin/python3.11").exists(), reason="the distribution has another Python")
def test_the_python_of_the_distribution_is_preferred_to_one_earlier_on_the_path(tree, monkeypatch):
    in_front = tree / "shims"
    in_front.mkdir()
    (in_front / "python3.11").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (in_front / "python3.11").chmod(0o755)
    # No environment can be created there: nothing is installed, and the error names its path.
    (tree / ".venv").symlink_to(in_front / "python3.11/nowhere")
    done = subprocess.run(
        ["bash", tree / "etc/venv", "run"],
        env={"PATH": f"{in_front}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.endswith("(/usr/bin/python3.11)\n")


def test_any_other_word_is_a_wrong_command_line(tree):
    assert venv(tree, "all", sys.executable)[0] == 2
