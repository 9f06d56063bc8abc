"""Small changes to the protocol's code that a programmer might make: `<` for `<=`, an omitted value, a superfluous
`not`.

mutmut makes the changes inside functions. Changes to texts for people, and to expressions inside these, are left out: a
text that contains a space may change freely.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.locked import installed

if TYPE_CHECKING:
    import libcst

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "plainsong/protocol"

#: The modules in which a mistake is worst come first: those that assign ids, find duplicates, decide and prove.
FOREMOST = (
    "ids",
    "keys",
    "page",
    "rows",
    "topic/core",
    "topic/publish",
    "topic/step",
    "topic/deduplication",
    "topic/producer_sessions",
    "topic/transactional",
    "topic/visibility",
    "topic/chain",
    "topic/chain_rules",
    "topic/verify",
    "transactions/decisions",
    "transactions/manager",
    "transactions/outcomes",
    "transactions/view",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one module."""

    module: str
    """Path below ``plainsong/protocol``, without its suffix: ``topic/core``."""
    line: int
    """The first line that differs."""
    before: str
    """That line, stripped."""
    after: str
    source: str
    """The module's text with the change."""

    @property
    def key(self) -> str:
        """Identifies the change: equal for the same change of the same text."""
        return hashlib.sha256(f"{self.module}\n{self.source}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line}\n  - {self.before}\n  + {self.after}"


def add_tools() -> None:
    """Make mutmut and coverage importable, with lower priority than everything in the tests' environment.

    They have a separate environment under ``.cache``, because their dependencies are needed only here.
    """
    python = installed("mutate")
    if python is None:
        raise RuntimeError("requirements-mutate.lock could not be installed; see the lines above")
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    if str(packages) not in sys.path:
        sys.path.append(str(packages))


def modules() -> list[str]:
    """Return the protocol's modules, those of ``FOREMOST`` first."""
    names = sorted(path.relative_to(CORE).with_suffix("").as_posix() for path in CORE.rglob("*.py"))
    return [*FOREMOST, *(name for name in names if name not in FOREMOST and not name.endswith("__init__"))]


def path_of(module: str) -> Path:
    return CORE / f"{module}.py"


@cache
def _module(name: str) -> tuple[libcst.Module, list[Any]]:
    """Return the syntax tree of a module, and mutmut's changes in its functions."""
    import libcst
    from libcst.metadata import MetadataWrapper
    from mutmut.mutation.file_mutation import MutationVisitor
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.mutation.pragma_handling import IgnoredCode

    wrapper = MetadataWrapper(libcst.parse_module(path_of(name).read_text(encoding="utf-8")))
    visitor = MutationVisitor(mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    told = _inside_prose(wrapper.module)
    found = [
        each
        for each in visitor.mutations
        if isinstance(each.contained_by_top_level_function, libcst.FunctionDef)
        and id(each.original_node) not in told
        and not _is_prose(each)
    ]
    return wrapper.module, found


def _inside_prose(tree: libcst.Module) -> set[int]:
    """Return the nodes inside texts for people, such as the number of digits in an error's text."""
    import libcst

    class Walk(libcst.CSTVisitor):
        def __init__(self) -> None:
            super().__init__()
            self.depth, self.found = 0, set[int]()

        def on_visit(self, node: libcst.CSTNode) -> bool:
            if self.depth:
                self.found.add(id(node))
            self.depth += isinstance(node, libcst.FormattedString) and _has_space(node)
            return True

        def on_leave(self, original_node: libcst.CSTNode) -> None:
            self.depth -= isinstance(original_node, libcst.FormattedString) and _has_space(original_node)

    walk = Walk()
    tree.visit(walk)
    return walk.found


def _is_prose(mutation: Any) -> bool:
    """True if the mutation only changes or removes text for people."""
    import libcst

    before, after = mutation.original_node, mutation.mutated_node
    if isinstance(before, libcst.SimpleString):
        return _has_space(before)
    if isinstance(before, libcst.Call) and isinstance(after, libcst.Call):
        kept = {id(argument) for argument in after.args}
        gone = [argument.value for argument in before.args if id(argument) not in kept]
        return bool(gone) and all(_has_space(value) for value in gone)
    return False


def _has_space(node: libcst.BaseExpression) -> bool:
    import libcst

    if isinstance(node, libcst.ConcatenatedString):
        return True
    if isinstance(node, libcst.FormattedString):
        return any(isinstance(part, libcst.FormattedStringText) and " " in part.value for part in node.parts)
    return isinstance(node, libcst.SimpleString) and " " in node.value


def count(module: str) -> int:
    """Return the number of a module's mutants."""
    return len(_module(module)[1])


def sample(module: str, most: int | None, seed: int) -> Iterator[Mutant]:
    """Yield up to ``most`` different mutants of a module, drawn by a seed; all of them if it is None.

    A larger draw begins with the smaller one.
    """
    tree, mutations = _module(module)
    drawn = list(mutations)
    random.Random(f"{seed} {module}").shuffle(drawn)
    seen = set[str]()
    for mutation in drawn[:most]:
        changed = tree.deep_replace(mutation.original_node, mutation.mutated_node)
        mutant = _mutant(module, tree.code, changed.code)
        if mutant is not None and mutant.key not in seen:
            seen.add(mutant.key)
            yield mutant


def _mutant(module: str, before: str, after: str) -> Mutant | None:
    """Return None if the change has no effect on the text."""
    old, new = before.splitlines(), after.splitlines()
    for number, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            return Mutant(module, number + 1, a.strip(), b.strip(), after)
    return None
