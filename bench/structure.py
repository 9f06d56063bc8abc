"""Figures about the source tree: files, function bodies, comments, import depth and cycles, repeated class names.

    python -m bench.structure [--root DIR] [PACKAGE ...]

Imports are read from the source, including those under ``TYPE_CHECKING`` and inside functions; no module is imported.
The depth is the longest chain of modules that import one another, with the modules of a cycle counted as one.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

PACKAGES = ("storage", "actors", "broker", "plainsong", "pyspark_plainsong")


class Source(NamedTuple):
    """A parsed file; ``module``: its dotted name."""

    module: str
    tree: ast.Module
    text: str


def sources(root: Path, packages: tuple[str, ...]) -> dict[str, Source]:
    """Return every module of the packages, by its dotted name."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            found[module] = Source(module, ast.parse(text), text)
    return found


def imports_of(source: Source, known: dict[str, Source], *, type_only: bool) -> set[str]:
    """Return the modules that a module imports; ``type_only``: including those under ``TYPE_CHECKING``."""
    found = set()
    skipped = set()
    if not type_only:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped |= {id(each) for each in ast.walk(node)}
    for node in ast.walk(source.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name in known and name != source.module}


def rings(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph, callees before callers (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def depth(graph: dict[str, set[str]]) -> int:
    """Return the number of modules on the longest chain of imports."""
    place = {}
    deepest: dict[int, int] = {}
    for number, ring in enumerate(rings(graph)):
        for module in ring:
            place[module] = number
        below = {place[other] for module in ring for other in graph[module]} - {number}
        deepest[number] = 1 + max((deepest[other] for other in below), default=0)
    return max(deepest.values(), default=0)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function after its signature and docstring."""
    body = node.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def docstring_lines(tree: ast.Module) -> int:
    """Return the number of lines in docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, kinds))
    return sum(text.count("\n") + 1 for text in found if text)


def comment_lines(text: str) -> int:
    """Return the number of comments."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def spread(numbers: list[int]) -> str:
    """Format the median, the 90th percentile and the maximum."""
    ordered = sorted(numbers)
    return f"{median_low(ordered)} / {ordered[len(ordered) * 9 // 10]} / {ordered[-1]}"


def report(root: Path, packages: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the figures by name."""
    known = sources(root, packages)
    lengths = [source.text.count("\n") for source in known.values() if source.text.strip()]
    lines = sum(lengths)
    bodies = [
        body_lines(node)
        for source in known.values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    at_run_time = {name: imports_of(source, known, type_only=False) for name, source in known.items()}
    with_types = {name: imports_of(source, known, type_only=True) for name, source in known.items()}
    biggest = [max(map(len, rings(graph))) for graph in (at_run_time, with_types)]
    homes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, source in known.items():
        if name.startswith("plainsong._sync"):  # the twin of plainsong._async
            continue
        package = "plainsong.protocol" if name.startswith("plainsong.protocol") else name.split(".")[0]
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                homes[package, node.name].add(name)
    tests = sum(path.read_text(encoding="utf-8").count("\n") for path in (root / "tests").rglob("*.py"))
    return [
        ("files", f"{len(known)} ({lines / 1000:.1f}k lines)"),
        ("file median / p90 / max", spread(lengths)),
        ("body of a function median / p90 / max", spread(bodies)),
        ("comments per 100 lines", f"{100 * sum(comment_lines(each.text) for each in known.values()) / lines:.1f}"),
        ("lines of docstrings", f"{sum(docstring_lines(each.tree) for each in known.values()) / 1000:.1f}k"),
        ("import depth (with type-only imports)", f"{depth(at_run_time)} ({depth(with_types)})"),
        ("biggest ring (with type-only imports)", " (".join("0" if size == 1 else str(size) for size in biggest) + ")"),
        ("class names with several homes in a package", str(sum(len(places) > 1 for places in homes.values()))),
        ("test : source", f"{tests / lines:.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    wanted = parser.parse_args()
    for name, figure in report(wanted.root, tuple(wanted.packages)):
        print(f"{name:<46}{figure}")


if __name__ == "__main__":
    main()
