"""Changes functions of loaded modules: each gets its code from another text of the module."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

Place = tuple[str, str, int]


class NotApplicable(Exception):
    """No loaded function has the change: it is in code that ran when the module was loaded."""


def functions_below(folder: Path) -> dict[Place, list[FunctionType]]:
    """Return every function loaded from a folder, by place of definition."""
    gc.unfreeze()  # frozen objects are in no list
    found: dict[Place, list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{folder}/"):
            found.setdefault(_place(each.__code__), []).append(each)
    return found


def swap(functions: dict[Place, list[FunctionType]], path: Path, source: str) -> int:
    """Give functions of a module their code and default values from ``source``; return how many changed.

    Functions are changed in place, so every reference has the change: tables of rules, properties, imported names.
    """
    original = path.read_text(encoding="utf-8")
    before = list(_codes(compile(original, str(path), "exec")))
    after = list(_codes(compile(source, str(path), "exec")))
    changed = 0
    for old, new in zip(before, after, strict=True):
        if old != new:
            for function in functions.get(_place(old), ()):
                try:
                    function.__code__ = new
                except ValueError:  # a closure over different names
                    continue
                changed += 1
    changed += _defaults(functions, path, original, source)
    if not changed:
        raise NotApplicable(f"no function of {path.name} that is loaded has the change")
    return changed


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of every function and class in a module or function, in text order."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and not each.co_name.startswith("<"):
            yield each
            yield from _codes(each)


def _defaults(functions: dict[Place, list[FunctionType]], path: Path, original: str, source: str) -> int:
    changed = 0
    for old, new in zip(_definitions(original), _definitions(source), strict=True):
        if ast.dump(old.args) == ast.dump(new.args):
            continue
        line = min([old.lineno, *(each.lineno for each in old.decorator_list)])
        for (file, name, first), those in functions.items():
            if file == str(path) and first == line and name.rpartition(".")[2] == old.name:
                for function in those:
                    _evaluate_defaults(function, new.args)
                    changed += 1
    return changed


def _definitions(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _evaluate_defaults(function: FunctionType, arguments: ast.arguments) -> None:
    def value(node: ast.expr) -> object:
        return eval(compile(ast.Expression(node), "default", "eval"), function.__globals__)

    function.__defaults__ = tuple(value(each) for each in arguments.defaults) or None
    names = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    function.__kwdefaults__ = {each.arg: value(default) for each, default in names if default is not None}
