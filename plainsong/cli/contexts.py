"""Named daemons in a file: ``$XDG_CONFIG_HOME/plainsong/contexts.toml``.

    current = "production"

    [contexts.production]
    url = ["http://a.example:7420", "http://b.example:7420"]
    namespace = "orders"
    token_file = "/run/secrets/plainsong"

Tokens themselves are never kept there, and never printed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plainsong.cli.exits import CommandFailed, Exit
from protocol.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_KEYS = ("url", "namespace", "token_file")


@dataclass(frozen=True, slots=True)
class Context:
    """What one name stands for; None where it says nothing."""

    urls: tuple[str, ...]
    namespace: str | None = None
    token_file: str | None = None


@dataclass(slots=True)
class Contexts:
    """The file's content."""

    path: Path
    current: str | None = None
    by_name: dict[str, Context] = field(default_factory=dict)

    def named(self, name: str) -> Context:
        """The context of that name. Raises CommandFailed with the nearest one."""
        if name in self.by_name:
            return self.by_name[name]
        hint = nearest(name, self.by_name) if self.by_name else f"plainsong context add {name} --url URL"
        raise CommandFailed(f"there is no context {name!r}", hint=hint, code=Exit.NOT_FOUND)

    def save(self) -> None:
        """Replace the file, as a whole. Raises CommandFailed: it is what it was."""
        lines = [] if self.current is None else [f"current = {_toml(self.current)}", ""]
        for name, context in sorted(self.by_name.items()):
            lines += [f"[contexts.{name}]", f"url = {_toml(list(context.urls))}"]
            if context.namespace is not None:
                lines.append(f"namespace = {_toml(context.namespace)}")
            if context.token_file is not None:
                lines.append(f"token_file = {_toml(context.token_file)}")
            lines.append("")
        try:
            _replace(self.path, "\n".join(lines))
        except OSError as error:
            raise CommandFailed(f"{self.path} cannot be written: {error.strerror}") from error


def checked_name(name: str) -> str:
    """``name`` if it may name a context. Raises CommandFailed."""
    if _NAME.match(name):
        return name
    hint = "use 1 to 64 letters, digits, underscores and hyphens"
    raise CommandFailed(f"context {name[:80]!r} is not allowed", hint=hint, code=Exit.USAGE)


def contexts_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file is, whether it is there or not."""
    home = environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".config"
    return base / "plainsong" / "contexts.toml"


def load_contexts(path: Path | None = None) -> Contexts:
    """What the file says; nothing when it is not there. Raises CommandFailed when it cannot be understood."""
    path = path or contexts_path()
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
        return _parsed(path, told)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts(path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}", code=Exit.USAGE) from error
    except ValueError as error:
        hint = "mend it, or move it away and add the contexts again"
        raise CommandFailed(f"{path}: {error}", hint=hint, code=Exit.USAGE) from error


def _parsed(path: Path, told: dict[str, Any]) -> Contexts:
    """Raises ValueError, naming what is wrong."""
    current, contexts = told.pop("current", None), told.pop("contexts", {})
    if told:
        raise ValueError(f"unknown key {next(iter(told))!r}; known: contexts, current")
    if not isinstance(contexts, dict) or not isinstance(current, str | None):
        raise ValueError("current is a name, contexts is a table")
    found = Contexts(path, current)
    for name, context in contexts.items():
        found.by_name[name] = _context(name, context)
    if current is not None and current not in found.by_name:
        raise ValueError(f"current is {current!r}, and there is no such context")
    return found


def _context(name: str, told: object) -> Context:
    if not isinstance(told, dict) or not _NAME.match(name):
        raise ValueError(f"{name!r} is no context")
    for key in told:
        if key not in _KEYS:
            raise ValueError(f"contexts.{name} has an unknown key {key!r}; {nearest(key, _KEYS)}")
    url, namespace, token_file = (told.get(key) for key in _KEYS)
    urls = (url,) if isinstance(url, str) else tuple(url) if isinstance(url, list) else ()
    if not urls or not all(isinstance(each, str) for each in urls):
        raise ValueError(f"contexts.{name}.url is a URL or a list of them")
    if not isinstance(namespace, str | None) or not isinstance(token_file, str | None):
        raise ValueError(f"contexts.{name}: namespace and token_file are strings")
    return Context(urls, namespace, token_file)


def _toml(value: str | list[str]) -> str:
    """A string or a list of strings as TOML writes them; JSON's escapes are TOML's too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=".contexts-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
