"""Positions of keys and strings in a TOML document, which the standard library's reader does not report.

The document was parsed successfully before, so it is enough to recognize strings and comments.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: A comment, a string in one of four kinds of quotes, the end of a line, a bare word, or any other character.
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<text>\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*')
    |(?P<end>\n)|(?P<word>[A-Za-z0-9_+.-]+)|(?P<mark>[\[\]{}=,])|(?P<other>[^\S\n]+|.)""",
    re.VERBOSE | re.DOTALL,
)


class Place(NamedTuple):
    line: int
    column: int


class _Token(NamedTuple):
    place: Place
    text: str
    """For a string the text between its quotes, escapes not decoded."""
    is_key: bool


class Places:
    """Finds positions by table, key and string; falls back to the table, then to line 1."""

    def __init__(self, document: str) -> None:
        #: For each header: the table's name, its position, and the tokens up to the next header.
        self._tables: list[tuple[str, Place, list[_Token]]] = [("", Place(1, 1), [])]
        self._read(document)

    def _read(self, document: str) -> None:
        line, begin, depth, starting = 1, 0, 0, True
        header: list[str] | None = None
        where = Place(1, 1)
        for found in _TOKEN.finditer(document):
            kind, text = found.lastgroup, found.group()
            place = Place(line, found.start() - begin + 1)
            if kind == "end":
                line, begin = line + 1, found.end()
                starting = starting or depth == 0
                continue
            if kind == "text" and "\n" in text:
                line += text.count("\n")
                begin = found.start() + text.rfind("\n") + 1
            if kind in ("other", "comment"):
                continue
            if starting and text == "[" and header is None:
                header, where = [], place
            elif header is not None:
                if text == "]":
                    if header:
                        self._tables.append(("".join(header), where, []))
                        header, starting = None, False  # so that the second bracket of [[…]] is ignored below
                elif text != "[":
                    header.append(text.strip("\"'"))
                continue
            elif text in "[{":
                depth += 1
            elif text in "]}":
                depth = max(0, depth - 1)
            elif kind in ("text", "word"):
                self._tables[-1][2].append(_Token(place, text.strip("\"'") if kind == "text" else text, starting))
            starting = False

    def table(self, name: str, at: int) -> Place:
        """Return the position of the header of the table ``name``; of several, the ``at``-th, counted from 0."""
        found = self._found(name, at)
        return Place(1, 1) if found is None else found[1]

    def of(self, table: str, at: int, key: str, value: str | None = None) -> Place:
        """Return the position of ``value`` under ``key``, or of the key if it has no such value, or of the table."""
        found = self._found(table, at)
        if found is None:
            return Place(1, 1)
        _, place, tokens = found
        begun = False
        for token in tokens:
            if token.is_key:
                if begun:
                    break
                begun = token.text == key
                if begun:
                    place = token.place
            elif begun and value is not None and token.text == value:
                return token.place
        if not begun and not table:  # at the top level the key may be a table's name
            named = self._found(key, 0)
            return place if named is None else named[1]
        return place

    def _found(self, name: str, at: int) -> tuple[str, Place, list[_Token]] | None:
        same = [table for table in self._tables if table[0] == name]
        return same[at] if at < len(same) else None
