"""The audit tables computed simply, in Python, message by message: the reference for the job's tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

#: What the connector returns of a message: namespaced topic, id, time of publication in ms, payload.
Message = tuple[str, bytes, int, bytes]

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,1024}")
_ENTITY = re.compile(r"[a-z][a-z0-9_]{0,31}:[^\x00-\x1f\x7f]{1,1024}")


class Bad(Exception):
    """A message is a dead letter."""


def judge(payload: bytes, published_ms: int) -> dict[str, Any]:
    """The fields of a good message. Raises Bad with the reason and the detail."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise Bad("not_utf8", None) from None
    try:
        fields = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(fields, ensure_ascii=False).encode()  # lone surrogates are not text
    except (ValueError, RecursionError):
        raise Bad("not_json", None) from None
    if not isinstance(fields, dict):
        raise Bad("not_an_object", ...)
    need(fields, "version", int)
    if fields["version"] != 1:
        raise Bad("unknown_version", str(fields["version"]))
    need(fields, "type", str)
    if fields["type"] not in ("access", "metadata"):
        raise Bad("unknown_type", fields["type"][:200])
    need(fields, "time", int)
    for name in ("namespace", "user"):
        need(fields, name, str, _NAME)
    if fields["type"] == "access":
        for name in ("program", "run", "dataset"):
            need(fields, name, str, _NAME)
        need(fields, "access", str, re.compile("read|write|unknown"))
    else:
        need(fields, "entity", str, _ENTITY)
        for part in ("previous", "added", "removed"):
            need_change(fields, part)
        if fields.get("added") is None and fields.get("removed") is None:
            raise Bad("missing_field", "added or removed")
    if not 946_684_800_000 <= fields["time"] <= published_ms + 86_400_000:
        raise Bad("absurd_time", str(fields["time"]))
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def need(fields: dict[str, Any], name: str, kind: type, form: re.Pattern[str] | None = None) -> None:
    value = fields.get(name)
    if value is None:
        raise Bad("missing_field", name)
    # In Python a bool is an int. SQL has no integers of more than 64 bits.
    if type(value) is not kind or (kind is int and not -(2**63) <= value < 2**63):
        raise Bad("wrong_type", name)
    if form is not None and not form.fullmatch(value):
        raise Bad("bad_value", name)


def need_change(fields: dict[str, Any], part: str) -> None:
    change = fields.get(part)
    if change is None:
        return
    if not isinstance(change, dict):
        raise Bad("wrong_type", part)
    properties, tags = change.get("properties"), change.get("tags")
    if properties is not None and not (isinstance(properties, dict) and all_strings(properties.values())):
        raise Bad("wrong_type", f"{part}.properties")
    if tags is not None and not (isinstance(tags, list) and all_strings(tags)):
        raise Bad("wrong_type", f"{part}.tags")


def all_strings(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


class Tables:
    """The four tables as Python dictionaries."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        #: By topic and id, so that a repeated message counts once.
        self.trail: dict[tuple[str, bytes], tuple[Any, ...]] = {}
        self.dead: dict[tuple[str, bytes], tuple[Any, ...]] = {}
        self.usage: dict[tuple[str, ...], list[int]] = {}
        self.edges: dict[tuple[str, ...], list[int]] = {}
        for message in messages:
            self.add(*message)

    def add(self, topic: str, message_id: bytes, published_ms: int, payload: bytes) -> None:
        if (topic, message_id) in self.trail or (topic, message_id) in self.dead:
            return
        try:
            told = judge(payload, published_ms)
        except Bad as bad:
            self.dead[topic, message_id] = (*bad.args, payload)
            return
        access = told["type"] == "access"
        entity = f"dataset:{told['dataset']}" if access else told["entity"]
        which = tuple(told[name] if access else None for name in ("program", "run", "access"))
        changes = [None] * 3 if access else [change_of(told.get(part)) for part in ("previous", "added", "removed")]
        row = (told["time"], told["type"], told["namespace"], told["user"], entity, *which, *changes, published_ms)
        self.trail[topic, message_id] = row
        if access:
            self._access(told)

    def _access(self, told: dict[str, Any]) -> None:
        time = told["time"]
        use = self.usage.setdefault((told["namespace"], told["program"], told["dataset"]), [time, time, 0, 0, 0])
        use[0], use[1] = min(use[0], time), max(use[1], time)
        use[2 + ("read", "write", "unknown").index(told["access"])] += 1
        key = tuple(told[name] for name in ("namespace", "program", "run", "dataset", "access"))
        edge = self.edges.setdefault(key, [time, time, 0])
        edge[0], edge[1], edge[2] = min(edge[0], time), max(edge[1], time), edge[2] + 1


def change_of(change: dict[str, Any] | None) -> tuple[dict[str, str], list[str]]:
    change = change or {}
    return change.get("properties") or {}, change.get("tags") or []


# --- lineage ---------------------------------------------------------------------------------------


def flows_of(
    edges: Iterable[tuple[str, str, str, str, str]], *, unknown: bool = False
) -> set[tuple[str, str, str, str]]:
    """(source, program, run, target) for every read and write of one run."""
    every = list(edges)
    reads = {each[:4] for each in every if each[4] == "read" or (unknown and each[4] == "unknown")}
    writes = {each[:4] for each in every if each[4] == "write" or (unknown and each[4] == "unknown")}
    return {(r[3], r[1], r[2], w[3]) for r in reads for w in writes if r[:3] == w[:3]}


def distances(steps: set[tuple[str, str]], start: str) -> dict[str, int]:
    """Return the distance in steps of every dataset derived from `start`, by trying longer and longer paths."""
    found: dict[str, int] = {}
    now = {start}
    for distance in range(1, len(steps) + 1):
        now = {target for source, target in steps if source in now}
        for each in now:
            found.setdefault(each, distance)
    return found
