"""The ways in which the generator spoils a message: each makes a dead letter, whatever the message was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

Fields = dict[str, Any]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _without(name: str) -> Callable[[Fields], bytes]:
    return lambda fields: _json({key: value for key, value in fields.items() if key != name})


def _with(name: str, value: Any) -> Callable[[Fields], bytes]:
    return lambda fields: _json({**fields, name: value})


#: What is done to the fields of a good message, by the reason that the dead letter then has. No line ends in any.
SPOILING: Final[dict[str, tuple[Callable[[Fields], bytes], ...]]] = {
    "not_utf8": (lambda fields: b"\xff\xfe" + _json(fields), lambda fields: _json(fields)[:-1] + b',"x":"\x80"}'),
    "not_json": (
        lambda fields: b"",
        lambda fields: _json(fields)[:-1],
        lambda fields: _json(fields) + b"}",
        lambda fields: _json(fields) + b" " + _json(fields),
        lambda fields: b'{"user":"nobody",' + _json(fields)[1:],
        lambda fields: b"access by " + fields["user"].encode(),
        lambda fields: _json(fields).replace(b'"', b"'"),
    ),
    "not_an_object": (lambda fields: _json([fields]), lambda fields: b"null", lambda fields: b"17"),
    "missing_field": (
        *(_without(name) for name in ("version", "type", "time", "namespace", "user")),
        _with("user", None),
        lambda fields: _json({**fields, "type": "metadata", "entity": "dataset:x", "added": None, "removed": None}),
        lambda fields: _json({**fields, "type": "access", "program": None}),
    ),
    "wrong_type": (
        _with("version", "1"),
        _with("time", "2025-01-01"),
        _with("time", 1_735_689_600_000.5),
        _with("user", 5),
        _with("namespace", ["default"]),
        lambda fields: _json({**fields, "type": "metadata", "entity": "dataset:x", "added": {"tags": [1]}}),
        lambda fields: _json({**fields, "type": "metadata", "entity": "dataset:x", "added": {"properties": {"a": 1}}}),
    ),
    "bad_value": (
        _with("user", ""),
        _with("user", "two\tnames"),
        _with("namespace", "x" * 1025),
        lambda fields: _json(
            {**fields, "type": "access", "program": "p", "run": "r", "dataset": "d", "access": "delete"}
        ),
        lambda fields: _json({**fields, "type": "metadata", "entity": "no kind", "added": {}}),
    ),
    "unknown_version": (_with("version", 2), _with("version", 0)),
    "unknown_type": (_with("type", "deletion"), _with("type", "")),
    "absurd_time": (
        _with("time", 0),
        _with("time", -1),
        _with("time", 9_007_199_254_740_993),
        _with("time", 2**63 - 1),
    ),
}


def spoiled(rng: random.Random, fields: Fields) -> bytes:
    """A payload that says almost what `fields` say, and is bad."""
    return rng.choice(SPOILING[rng.choice(list(SPOILING))])(fields)
