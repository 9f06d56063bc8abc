"""The simulation finds planted mistakes, and each mistake's place still exists in the code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.planted import MISTAKES, named, with_mistake
from tests.simulation.table import names_in_document

#: Some mistakes that are found quickly: a seed that finds each, and the number of histories to search from there on in
#: case the code has changed: more than twice the number that a search from seed 0 takes.
SOON = {
    "a failed commit is acknowledged": (3, 20),
    "answered while the disk works": (0, 20),
    "the mark forgets the last position": (4, 20),
    "the watermark moves before the commit": (14, 40),
    "readers see what is in progress": (0, 20),
    "an opened session keeps its epoch": (3, 20),
    "what readers saw expire is forgotten with the owner": (15, 40),
    "a failed request is reported as not having happened": (3, 50),
    "a parked poll is not woken by new messages": (5, 20),
    "a rollback adds no entry to the chain": (0, 20),
    "a pointer that was answered is issued again": (7, 20),
    "a begin of Tephra's clients that a crash loses is on no list": (55, 150),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_each_planted_mistake_has_its_place_in_the_code(mistake):
    spec = importlib.util.find_spec(mistake.module)
    changed = with_mistake(Path(spec.origin).read_text(encoding="utf-8"), mistake)
    compile(changed, spec.origin, "exec")


def test_a_mistake_whose_place_is_missing_is_an_error():
    with pytest.raises(LookupError):
        with_mistake("nothing", MISTAKES[0])


def test_mistakes_have_unique_names():
    assert all(named(each.name) is each for each in MISTAKES)


def test_the_document_has_a_row_for_each_mistake():
    assert sorted(names_in_document()) == sorted(each.name for each in MISTAKES)


@pytest.mark.parametrize("name", SOON, ids=[name.replace(" ", "-") for name in SOON])
def test_the_simulation_finds_each_planted_mistake(name):
    first, count = SOON[name]
    search = ["--planted", name, "--first", str(first), "--count", str(count)]
    command = [sys.executable, "-m", "tests.simulation", "--json", *search]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert found["anomalies"] or found["unexplained"]
