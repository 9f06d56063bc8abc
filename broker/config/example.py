"""Writes etc/plainsong.toml: every setting at its default, with its unit and what its extremes do.

``make etc`` runs this; a test checks that the file is up to date.
"""

from __future__ import annotations

import sys
from textwrap import wrap
from typing import TYPE_CHECKING

from broker.config.config import every_setting, sections
from broker.config.values import show_value
from storage.settings import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from broker.config.config import Setting

_HEAD = """\
# All settings of Plainsong, with their defaults.
#
#   plainsong serve --config etc/plainsong.toml
#
# Without --config no file is read. The environment overrides this file (http.bind is
# PLAINSONG_HTTP__BIND, and PORT replaces its port only), and flags override the environment
# (--set http.bind=127.0.0.1:8080). `plainsong config check` lists mistakes, and
# `plainsong config show --origin` where each value comes from. Sizes are bytes, or text
# with a unit: "64 KiB", "64 MiB", "2 GiB".
"""
_UNITS = {
    Kind.BYTES: "Bytes",
    Kind.SECONDS: "Seconds",
    Kind.WHOLE_SECONDS: "Whole seconds",
    Kind.MILLISECONDS: "Milliseconds",
    Kind.COUNT: "A number",
}


def example_toml() -> str:
    """Return the text of etc/plainsong.toml."""
    lines = [_HEAD.rstrip()]
    for section, cls in sections().items():
        lines += ["", "", f"# {cls.__doc__}", f"[{section}]"]
        for setting in every_setting().values():
            if setting.section == section:
                lines += ["", *_comment(setting), f"{setting.key} = {show_value(setting.meaning, setting.default)}"]
    return "\n".join(lines) + "\n"


def bounds_of(setting: Setting) -> str:
    """Return the unit and bounds, as in ``Bytes, 1 KiB to 2 GiB``, or the choices."""
    meaning = setting.meaning
    if meaning.choices:
        return "One of: " + ", ".join(meaning.choices)
    if meaning.kind not in _UNITS:
        return ""
    low, high = (show_value(meaning, bound).strip('"') for bound in (meaning.low, meaning.high))
    return f"{_UNITS[meaning.kind]}, {low} to {high}"


def _comment(setting: Setting) -> Iterator[str]:
    meaning = setting.meaning
    yield from _lines(meaning.says)
    if bounds := bounds_of(setting):
        yield from _lines(bounds + ".")
    if meaning.small:
        yield from _lines(f"Too small: {meaning.small}.")
    if meaning.large:
        yield from _lines(f"Too large: {meaning.large}.")


def _lines(text: str) -> Iterator[str]:
    return ("# " + line for line in wrap(text, 96))


if __name__ == "__main__":
    sys.stdout.write(example_toml())
