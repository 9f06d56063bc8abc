"""Mutants change loaded code, run within bounds, and are judged by the results of the tests."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.mutation.equivalent import EQUIVALENT, why_equivalent
from tests.mutation.judge import KILLED, SURVIVED, Baseline, Verdict, forked
from tests.mutation.mutants import FOREMOST, Mutant, modules, path_of
from tests.mutation.swap import NotApplicable, functions_below, swap
from tests.mutation.table import row, total

MODULE = """
LIMIT = 3

def below(number, limit=LIMIT):
    return number < limit

def listed(numbers):
    return [each for each in numbers if below(each)]

class Box:
    @property
    def doubled(self):
        return 2 * LIMIT

    @staticmethod
    def named(*, name="box"):
        return name

RULES = {"below": below}
WHOLE = below(1)
"""


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """A module, and a function that changes a text in it."""
    path = tmp_path / "loaded_to_be_changed.py"
    path.write_text(MODULE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    functions = functions_below(tmp_path)
    return module, lambda old, new: swap(functions, path, MODULE.replace(old, new))


def test_every_reference_to_a_function_gets_its_change(loaded):
    module, change = loaded
    held = module.RULES["below"]
    assert not held(3)
    change("number < limit", "number <= limit")
    assert held(3)
    assert module.listed([2, 3, 4]) == [2, 3]


def test_properties_comprehensions_and_default_values_are_changed(loaded):
    module, change = loaded
    change("2 * LIMIT", "3 * LIMIT")
    assert module.Box().doubled == 9
    change("if below(each)", "if not below(each)")
    assert module.listed([2, 3, 4]) == [3, 4]
    change("limit=LIMIT", "limit=10")
    assert module.below(9)
    change('name="box"', 'name="BOX"')
    assert module.Box.named() == "BOX"


def test_a_change_of_code_that_ran_at_import_is_distinguished(loaded):
    module, change = loaded
    with pytest.raises(NotApplicable):
        change("WHOLE = below(1)", "WHOLE = below(5)")
    assert module.WHOLE


def test_an_endless_mutant_is_killed_by_its_share_of_the_processor():
    def never_ends():
        while True:
            pass

    assert forked(never_ends, 1) == (-1, "")


def test_a_mutant_that_raises_during_the_tests_is_killed():
    def raises():
        raise MemoryError

    assert forked(raises, 60) == (KILLED, "")
    assert forked(lambda: (SURVIVED, ""), 60) == (SURVIVED, "")
    assert forked(lambda: (KILLED, "test_of_it"), 60) == (KILLED, "test_of_it")


def test_the_tests_of_a_mutant_are_those_that_run_its_line_with_the_quickest_first():
    baseline = Baseline({"slow": 2.0, "quick": 0.1, "other": 0.0}, {"ids": {7: [0, 1], 9: [2]}})
    assert baseline.tests_of("ids", 6, 8) == ["quick", "slow"]
    assert baseline.tests_of("ids", 1, 2) == []
    assert baseline.tests_of("keys", 7, 7) == []


def test_a_mutant_is_recognised_while_its_module_stays_the_same():
    mutant = Mutant("ids", 3, "a < b", "a <= b", "a <= b\n")
    assert mutant.key == Mutant("ids", 3, "a < b", "a <= b", "a <= b\n").key
    assert mutant.key != Mutant("ids", 3, "a < b", "a <= b", "a <= b\nelse\n").key
    assert mutant.key != Mutant("keys", 3, "a < b", "a <= b", "a <= b\n").key


def test_only_judged_mutants_that_behave_differently_count_in_the_share():
    def mutant(place: int) -> Mutant:
        return Mutant("ids", place, "", "", str(place))

    class Judged:
        def __init__(self, verdict: str) -> None:
            self.verdict = verdict

    verdicts = [Verdict.KILLED] * 3 + [Verdict.ENDLESS, Verdict.SURVIVED, Verdict.UNCOVERED, Verdict.LOADED]
    those = [mutant(place) for place in range(len(verdicts) + 1)]  # one is not judged yet
    kept = {each.key: Judged(verdict) for each, verdict in zip(those, verdicts, strict=False)}
    found = row("ids", 100, those, kept)
    assert (found.mutants, found.tried, found.killed, found.equivalent, found.open) == (100, 6, 4, 0, 2)
    assert found.share == 4 / 6
    assert total([found, found]).killed == 8


@pytest.mark.parametrize("each", EQUIVALENT, ids=lambda each: f"{each.module}:{each.before[:30]}")
def test_a_mutant_that_is_called_equivalent_has_its_line_in_the_code(each):
    lines = [line.strip() for line in path_of(each.module).read_text(encoding="utf-8").splitlines()]
    assert each.before in lines
    assert each.before != each.after
    assert why_equivalent(Mutant(each.module, 1, each.before, each.after, "")) == each.why


@pytest.mark.parametrize(
    ("before", "after", "is_equivalent"),
    [
        ('a(b, "big") + c(d, "big")', 'a(b, ) + c(d, "big")', True),
        ('a(b, "big") + c(d, "big")', 'a(b, "big") + c(d, )', True),
        ('a(b, "big") + c(d, "big")', 'a(b, "big") - c(d, "big")', False),
        ('a(b, "big")', 'a("big")', False),
        ('x.encode("ascii")', 'x.encode("ASCII")', True),
    ],
)
def test_some_kinds_of_mutants_are_equivalent_wherever_they_are(before, after, is_equivalent):
    assert (why_equivalent(Mutant("ids", 1, before, after, "")) is not None) == is_equivalent


def test_the_most_important_modules_are_listed_once_each():
    assert modules()[: len(FOREMOST)] == list(FOREMOST)
    assert len(set(modules())) == len(modules())
