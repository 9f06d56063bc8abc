"""Loads the settings: defaults, overridden by the file, the environment and flags; records the origin of each value."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.config.config import Config, ConfigError, Problem, check_across, config_of, every_setting, sections
from broker.config.values import Address, parse_binds, read_value
from plainsong.protocol.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PREFIX = "PLAINSONG_"
_URL = re.compile(r"https?:")
#: Settings of the previous version that have no effect any more, and the reason; the next version refuses them.
RETIRED = {
    "http.gzip_min_bytes": "answers of 1 KiB and more are compressed for every client that accepts gzip",
    "http.lane": "all HTTP/1.1 requests are served in the same way now",
    "storage.compression": "LevelDB now compresses every block that gets smaller",
    "transactions.max_held_polls": "at most 10 000 polls wait for transactions; http.max_connections limits them too",
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings and, by name, the origin of each: ``default``, a file, a variable, or a flag."""

    config: Config
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()
    """Settings without effect, each with its origin."""


def load_config(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> LoadedConfig:
    """Read and check all settings. Opens no file except ``file``.

    Args:
      file: the TOML file; None if there is none. File names in it are relative to its folder, except
        ``storage.data_dir``.
      environ: ``PLAINSONG_<SECTION>__<KEY>`` sets a value (a nested section adds a ``__``), ``PORT`` sets the first port
        of ``http.bind``; other names, even with ``PLAINSONG_``, are ignored.
      flags: values by ``section.key``, as text or already parsed.
    Raises:
      ConfigError: lists all problems, not only the first.
    """
    loading = _Loading()
    if file is not None:
        loading.take_file(file)
    loading.take_environ(environ)
    for name, raw in flags.items():
        loading.take(name, raw, "flag", text=True)
    config = config_of(loading.values)
    # Combinations of settings are checked only if each setting is valid.
    problems = loading.problems or check_across(config, loading.origins)
    if problems:
        raise ConfigError(problems)
    return LoadedConfig(config, loading.origins, tuple(loading.warnings))


class _Loading:
    """The values so far, where later ones replace earlier ones, and their problems."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = dict.fromkeys(every_setting(), "default")
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def take(self, name: str, raw: object, origin: str, *, text: bool, folder: Path | None = None) -> None:
        if name in RETIRED:
            self.warnings.append(f"{origin}: {name} has no effect any more ({RETIRED[name]}): remove it")
            return
        setting = every_setting().get(name)
        if setting is None:
            self.problems.append(Problem(origin, f"unknown setting {name!r}", nearest(name, every_setting())))
            return
        try:
            value = read_value(setting.meaning, raw, text=text)
        except ValueError as error:
            self.problems.append(Problem(origin, f"{name}: {error}"))
            return
        if folder is not None and setting.meaning.is_file and value and not _URL.match(str(value)):
            value = str(folder / str(value))
        self.values[name] = value
        self.origins[name] = origin

    def take_file(self, file: Path) -> None:
        origin = f"file {file}"
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            self.problems.append(Problem(origin, "the file does not exist"))
        except OSError as error:
            self.problems.append(Problem(origin, f"cannot be read: {error.strerror}"))
        except UnicodeDecodeError as error:
            self.problems.append(Problem(origin, f"is not UTF-8 text (byte {error.start})"))
        except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
            self.problems.append(Problem(origin, f"is not TOML: {error}"))
        else:
            for section, table in tables.items():
                self._take_table(section, table, origin, file.parent)

    def _take_table(self, section: str, table: object, origin: str, folder: Path) -> None:
        if section not in sections():
            self.problems.append(Problem(origin, f"unknown section [{section}]", nearest(section, sections())))
        elif not isinstance(table, dict):
            self.problems.append(
                Problem(
                    origin, f"{section!r} is a section", f"write [{section}] on a line of its own, and its keys below"
                )
            )
        else:
            for key, raw in table.items():
                name = f"{section}.{key}"
                if name in sections() or (isinstance(raw, dict) and name not in every_setting()):
                    self._take_table(name, raw, origin, folder)
                else:
                    self.take(name, raw, origin, text=False, folder=folder)

    def take_environ(self, environ: Mapping[str, str]) -> None:
        for variable, name in _ours(environ):
            self.take(name, environ[variable], f"environment {variable}", text=True)
        if environ.get("PORT", "").strip():
            self._take_port(environ["PORT"].strip())

    def _take_port(self, port: str) -> None:
        """Apply ``PORT``, by which hosting platforms pass the port, without an address."""
        origin = "environment PORT"
        places = parse_binds(self.values.get("http.bind", every_setting()["http.bind"].default))
        first = next((place for place in places if isinstance(place, Address)), None)
        if first is None:
            self.problems.append(Problem(origin, "http.bind has no port, only Unix sockets"))
            return
        texts = [str(place).rpartition(":")[0] + ":" + port if place is first else str(place) for place in places]
        self.take("http.bind", ",".join(texts), origin, text=True)


def _ours(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that set a setting, with its name: those with a double underscore after the prefix."""
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and "__" in name:
            yield variable, name.replace("__", ".").lower()
