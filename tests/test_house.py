"""The structure of the code: no rings of imports, first sentences of files, and a correct example.

``tests/test_static.py`` checks layers and most generated files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.structure import imports_of, rings, sources
from broker.config import every_setting
from broker.config.example import example_toml
from scripts.audit import judged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.structure import Source

ROOT = Path(__file__).parents[1]
PACKAGES = ("storage", "actors", "broker", "plainsong", "pyspark_plainsong")

TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
SOURCES = sorted(path for floor in (*PACKAGES, "bench", "examples", "tests") for path in (ROOT / floor).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_api_reference_matches_the_code():
    pytest.importorskip("griffe", reason="NOT TESTED: griffelib is not installed here")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run: make docs\n{done.stdout}{done.stderr}"


def test_the_daemon_starts_without_the_libraries_that_only_some_daemons_need():
    """Loading them at start took 0.2 s of processor time and 8 MB, so they are loaded on first use."""
    code = "import broker.main, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "broker.http.http1" in loaded.split()
    assert {"quart", "hypercorn", "cryptography", "joserfc", "aiohappybase", "kazoo", "obstore"}.isdisjoint(
        loaded.split()
    )


@cache
def known_sources() -> dict[str, Source]:
    """Return every module of the packages, parsed once."""
    return sources(ROOT, PACKAGES)


def test_no_imports_run_in_a_ring_those_for_types_included():
    known = known_sources()
    graph = {name: imports_of(source, known, type_only=True) for name, source in known.items()}
    assert [ring for ring in rings(graph) if len(ring) > 1] == []


def test_a_class_name_has_one_home_in_a_package():
    homes: dict[tuple[str, str], list[str]] = {}
    for name, source in known_sources().items():
        if name.startswith("plainsong._sync"):  # generated from plainsong._async
            continue
        package = "plainsong.protocol" if name.startswith("plainsong.protocol") else name.split(".")[0]
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault((package, node.name), []).append(name)
    assert {cls: places for cls, places in homes.items() if len(places) > 1} == {}


def test_every_file_opens_with_a_sentence():
    bare = [named(path) for path in SOURCES if not opens_with_a_sentence(path)]
    assert not bare


def opens_with_a_sentence(path: Path) -> bool:
    with path.open("rb") as file:
        # Only the first statement is parsed: parsing all files takes four seconds.
        tokens = (token for token in tokenize.tokenize(file.readline) if token.type not in BEFORE_THE_DOCSTRING)
        first = next(tokens)
        docstring = ast.get_docstring(ast.parse(first.string)) if first.type == tokenize.STRING else None
    return bool(re.search(r"[.:?!]$", (docstring or "").split("\n\n")[0].rstrip()))


BEFORE_THE_DOCSTRING = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}


def test_no_module_is_called_manager_helper_or_util():
    # "Transaction manager" is Tephra's own term.
    tephras = {"plainsong/protocol/transactions/manager.py"}
    assert not {named(path) for path in SOURCES if re.search(r"manager|helper|util", path.stem)} - tephras


def test_no_two_test_files_have_one_name():
    """Test files are imported by name, from any folder."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_example_file_says_exactly_the_defaults():
    assert (ROOT / "etc/plainsong.toml").read_text(encoding="utf-8") == example_toml(), "run: make etc"


def test_the_example_file_names_every_setting_and_nothing_else():
    tables = tomllib.loads((ROOT / "etc/plainsong.toml").read_text(encoding="utf-8"))
    assert set(_names(tables, "")) == set(every_setting())


def _names(tables: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_setting_explains_itself():
    for name, setting in every_setting().items():
        assert setting.meaning.says.endswith("."), name
        if setting.meaning.low is not None and name != "http.bind":
            assert setting.meaning.small, name
            assert setting.meaning.large, name


def test_lock_files_name_hashes_and_no_host():
    locks = sorted(ROOT.glob("requirements*.lock"))
    assert len(locks) == 6
    for lock in locks:
        text = lock.read_text(encoding="utf-8")
        assert "--hash=sha256:" in text
        assert "://" not in text, lock.name
        assert not re.search(r"^\s*(-i|-f|--index|--extra-index|--find-links|--trusted)", text, re.MULTILINE), lock.name


def test_lock_files_satisfy_the_projects_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = {
        "requirements.lock": project["project"]["dependencies"] + project["dependency-groups"]["run"],
        "requirements-dev.lock": project["project"]["dependencies"] + project["dependency-groups"]["dev"],
        "requirements-bench.lock": project["dependency-groups"]["bench"],
        "requirements-audit.lock": project["dependency-groups"]["audit"],
        "requirements-mutate.lock": project["dependency-groups"]["mutate"],
        "requirements-engines.lock": project["dependency-groups"]["engines"],
    }
    for lock, requirements in wanted.items():
        locked = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE))
        assert {re.split(r"[<>=!~ \[]", each)[0].lower() for each in requirements} <= locked, lock


def test_all_lock_files_agree():
    versions: dict[str, set[str]] = {}
    for lock in ROOT.glob("requirements*.lock"):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE):
            versions.setdefault(name, set()).add(version)
    assert not {name: found for name, found in versions.items() if len(found) > 1}


def test_the_audit_names_vulnerable_packages_and_those_that_it_could_not_look_up():
    well = {"name": "trio", "version": "0.35.0", "vulns": []}
    known = {"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"], "aliases": []}
    ill = {"name": "lib", "version": "2.0", "vulns": [known, {"id": "PYSEC-2", "fix_versions": []}]}
    unknown = {"name": "ours", "skip_reason": "not found"}
    assert judged("a.lock", [well, well]) == (["a.lock: no known vulnerability in 2 dependencies"], False)
    lines, is_vulnerable = judged("a.lock", [well, ill, unknown])
    assert is_vulnerable
    assert lines == [
        "VULNERABLE: a.lock: lib 2.0: PYSEC-1, fixed in 2.1, 3.0",
        "VULNERABLE: a.lock: lib 2.0: PYSEC-2, fixed in no version yet",
        "NOT AUDITED: a.lock: ours",
    ]
    assert judged("a.lock", [unknown])[0] == ["NOT AUDITED: a.lock: none of its 1 dependencies is in the database"]


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    places = {f"{path}/" for path in (ROOT, Path.home()) if len(path.parts) > 1}
    for name in TRACKED:
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        assert not [place for place in places if place in text], name
