"""Query parameters: the few there are, each read once, unknown ones refused with the nearest known name."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from protocol.errors import InvalidParameter, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

#: Parameters one request may have; ours are a handful.
MAX_PARAMETERS = 32


def parse_query(query: str, known: Collection[str]) -> dict[str, str]:
    """The parameters of a raw query string.

    Raises:
      InvalidParameter: one is unknown or given twice, or it is not UTF-8; nothing happened.
    """
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except ValueError as error:
        raise InvalidParameter(f"the query string cannot be read: {error}") from None
    found: dict[str, str] = {}
    for key, value in pairs:
        if key not in known:
            raise InvalidParameter(f"unknown query parameter {key[:80]!r}", hint=nearest(key, known))
        if key in found:
            raise InvalidParameter(f"query parameter {key} is given twice")
        found[key] = value
    return found


def whole_number(parameters: dict[str, str], key: str) -> int | None:
    """A parameter that is a whole number, None when it is not given. Raises InvalidParameter."""
    text = parameters.get(key)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        return int(text)
    raise InvalidParameter(f"{key} is {text[:80]!r}", hint="use a whole number")


def one_of(parameters: dict[str, str], key: str, allowed: Sequence[str], default: str) -> str:
    """A parameter with few values. Raises InvalidParameter."""
    text = parameters.get(key, default)
    if text in allowed:
        return text
    raise InvalidParameter(f"{key} is {text[:80]!r}", hint="use one of: " + ", ".join(allowed))


def flag(parameters: dict[str, str], key: str) -> bool:
    """A parameter that is ``true`` or ``false`` (the default). Raises InvalidParameter."""
    return one_of(parameters, key, ("true", "false"), "false") == "true"
