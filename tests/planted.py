"""Plants a mistake into a copy of a module, to show that a test finds it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from hypothesis import settings


def planted(of: ModuleType, name: str, right: str, wrong: str) -> ModuleType:
    """Return the module with the mistake."""
    source = Path(of.__file__ or "").read_text(encoding="utf-8")
    assert source.count(right) == 1, f"the place of this mistake is gone: {name}"
    module = ModuleType("module_with_a_mistake")
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        exec(compile(source.replace(right, wrong), module.__name__, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


def seeds_for(name: str, quick: Mapping[str, int], every: Iterable[int]) -> list[int]:
    """Return the seeds with which to search for a mistake, in order: one that is known to find it, then all.

    ``make torture`` searches all of them at once.
    """
    known = [quick[name]] if name in quick and settings.get_current_profile_name() == "house" else []
    return [*known, *every]
