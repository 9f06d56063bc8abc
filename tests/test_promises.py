"""The ledger of promises is correct: everything that it names exists, and it names every attack on a promise."""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
from typing import get_args

import pytest

import tests.cluster.history.records
import tests.daemon.history
import tests.daemon.transactional_history
from tests.documents import DOCUMENTS, ROOT, anchors, links, spans
from tests.simulation.planted import MISTAKES
from tests.simulation.test_planted import SOON

PAGE = DOCUMENTS["docs/promises.md"]
CHECKERS = {
    "simulation": tests.cluster.history.records.Kind,
    "crash ring": tests.daemon.history.Kind,
    "ring of transactions": tests.daemon.transactional_history.Kind,
}
LABELS = ("Meaning", "Kept by", "Tests", "Rings", "Checkers", "Planted mistakes", "Not covered")
#: The README's wording of each promise, by number.
WORDED = {
    int(number): sentence
    for number, sentence in re.findall(
        r"^\| \[?(\d+)\]?\S* \| (\*\*.+) \|$", DOCUMENTS["README.md"].partition("## What it promises")[2], re.MULTILINE
    )
}


def parts(text: str) -> dict[str, str]:
    """Return the text after each bold label at the beginning of a line."""
    found = re.split(r"^\*\*([A-Z][\w ]+?)\.?\*\*", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


#: The parts of each promise, by number; 0 is the section after the ten promises.
LEDGER = {
    int(number or 0): (text, parts(text))
    for number, text in re.findall(r"^## (?:(\d+)\. )?[A-Z](.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
each_promise = pytest.mark.parametrize("number", range(1, 11))


def items(text: str) -> list[str]:
    return re.findall(r"^\* (.+)$", text, re.MULTILINE)


@functools.cache
def found_in(file: str) -> dict[str, bool]:
    """Return the tests in a file, and whether only ``make torture`` runs them."""
    found: dict[str, bool] = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found[node.name] = any(ast.unparse(mark) == "pytest.mark.torture" for mark in node.decorator_list)
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".TestCase"):
            found[ast.unparse(node.targets[0])] = False
    return found


def named_tests(text: str) -> list[tuple[str, str]]:
    """Return file and name of each test."""
    return [(file, test) for span in spans(text) for file, test in re.findall(r"^(tests/\S+\.py)::(\w+)$", span)]


def test_the_ledger_has_the_ten_promises_in_the_words_of_the_readme():
    assert list(WORDED) == list(range(1, 11))
    assert list(LEDGER) == [*range(1, 11), 0]
    for number, sentence in WORDED.items():
        assert f"\n> {sentence}\n" in LEDGER[number][0], number


@each_promise
def test_a_promise_has_all_its_parts_a_test_and_its_gaps(number: int):
    found = LEDGER[number][1]
    assert tuple(found) == LABELS
    assert named_tests(found["Tests"])
    assert named_tests(found["Rings"])
    assert items(found["Not covered"])


@each_promise
def test_the_code_that_keeps_a_promise_exists(number: int):
    entries = items(LEDGER[number][1]["Kept by"])
    assert entries
    for entry in entries:
        symbols = [span for span in spans(entry) if re.fullmatch(r"(?:actors|broker|plainsong|storage)[\w.]+", span)]
        assert symbols, entry
        for symbol in symbols:
            pkgutil.resolve_name(symbol)


@each_promise
def test_the_listed_tests_exist_and_run_in_the_listed_suite(number: int):
    found = LEDGER[number][1]
    for label in ("Tests", "Rings"):
        for entry in items(found[label]):
            named = named_tests(entry)
            assert named, entry
            for file, test in named:
                assert test in found_in(file), entry
                assert found_in(file)[test] == entry.endswith("(torture)"), entry


def test_every_test_in_the_ledger_is_in_one_of_its_lists():
    named = {
        f"{file}::{test}" for _, found in LEDGER.values() for part in found.values() for file, test in named_tests(part)
    }
    assert {span for span in spans(PAGE) if "::" in span} == named


def test_every_breach_that_a_checker_reports_is_listed_under_a_promise():
    said: dict[str, set[str]] = {name: set() for name in CHECKERS}
    for _, found in LEDGER.values():
        for name, kinds in re.findall(r"([a-z ]+): ((?:`[^`]+`(?:, )?)+)\.", found.get("Checkers", "")):
            said[name.strip()] |= set(spans(kinds))
    assert said == {name: set(get_args(kind)) for name, kind in CHECKERS.items()}


def test_every_planted_mistake_is_listed_under_the_promise_it_breaks():
    said = {entry for _, found in LEDGER.values() for entry in items(found["Planted mistakes"])}
    assert {entry.removesuffix(" •") for entry in said} == {each.name for each in MISTAKES}
    assert {entry.removesuffix(" •") for entry in said if entry.endswith(" •")} == set(SOON)


def test_the_readme_links_each_promise_to_its_entry():
    there = [link.partition("#")[2] for link in links(DOCUMENTS["README.md"]) if link.startswith("docs/promises.md#")]
    assert [int(anchor.partition("-")[0]) for anchor in there] == list(range(1, 11))
    assert set(there) <= anchors(PAGE)
