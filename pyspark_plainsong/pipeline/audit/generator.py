"""Generates any number of audit messages like those of a real platform; the same seed gives the same messages.

A few programs account for most runs, and a few datasets for most accesses. Runs overlap; each reads its inputs, writes
its outputs, and accesses some datasets in unknown ways. People edit the metadata of what they own. Events are late and
out of order, some are published twice, and a given fraction of the messages is bad in one of many ways.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMESPACE: Final = "default"
LAYERS: Final = ("raw", "clean", "joined", "features", "reports")
SUBJECTS: Final = (
    "purchases", "clicks", "sessions", "customers", "products", "stock", "prices", "returns", "payments", "shipments",
    "reviews", "searches", "campaigns", "visits", "suppliers", "invoices",
)  # fmt: skip
VERBS: Final = ("load", "clean", "join", "train", "summarise", "enrich", "export", "backfill")
PEOPLE: Final = (
    "ada", "alan", "barbara", "claude", "donald", "edsger", "frances", "grace", "hedy", "joan", "katherine", "lynn",
    "margaret", "niklaus", "radia", "tony",
)  # fmt: skip
PROGRAMS: Final = 120
#: One program in this many writes to an earlier layer, so that lineage has cycles.
BACKWARDS_ONE_IN: Final = 15


@dataclass(frozen=True)
class Program:
    """The datasets that a program reads and writes in each run, and its owner."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    owner: str


@dataclass(frozen=True)
class World:
    """All users, datasets and programs; those at the start of a list are used most often."""

    namespace: str
    users: tuple[str, ...]
    datasets: tuple[str, ...]
    programs: tuple[Program, ...]
    _user_weights: tuple[float, ...]
    _dataset_weights: tuple[float, ...]
    _program_weights: tuple[float, ...]

    def some_user(self, rng: random.Random) -> str:
        """A random user; earlier ones are more likely."""
        return rng.choices(self.users, cum_weights=self._user_weights)[0]

    def some_dataset(self, rng: random.Random) -> str:
        """A random dataset; earlier ones are more likely."""
        return rng.choices(self.datasets, cum_weights=self._dataset_weights)[0]

    def some_program(self, rng: random.Random) -> Program:
        """A random program; earlier ones are more likely."""
        return rng.choices(self.programs, cum_weights=self._program_weights)[0]


def make_world(rng: random.Random) -> World:
    """Make a platform; the same seed of ``rng`` gives the same platform."""
    datasets = [f"{layer}.{subject}" for layer in LAYERS for subject in SUBJECTS]
    programs = tuple(_program(rng, number) for number in range(PROGRAMS))
    rng.shuffle(datasets)
    users = (*PEOPLE, *(f"service-{verb}" for verb in VERBS))
    return World(
        NAMESPACE, users, tuple(datasets), programs, _weights(len(users)), _weights(len(datasets)), _weights(PROGRAMS)
    )


def _program(rng: random.Random, number: int) -> Program:
    """A program that reads from a layer and the one below, and writes to the next layer."""
    to = rng.randrange(1, len(LAYERS))
    inputs = {f"{LAYERS[rng.choice((to - 1, max(0, to - 2)))]}.{_subject(rng)}" for _ in range(rng.randint(1, 4))}
    outputs = {f"{LAYERS[to]}.{_subject(rng)}" for _ in range(rng.choice((1, 1, 2)))}
    if number % BACKWARDS_ONE_IN == 0:
        outputs.add(f"{LAYERS[to - 1]}.{_subject(rng)}")
    verb = VERBS[number % len(VERBS)]
    owner = f"service-{verb}" if rng.random() < 0.7 else rng.choice(PEOPLE)
    return Program(f"{verb}-{_subject(rng)}-{number}", tuple(sorted(inputs)), tuple(sorted(outputs)), owner)


def _subject(rng: random.Random) -> str:
    return rng.choices(SUBJECTS, cum_weights=_weights(len(SUBJECTS)))[0]


def _weights(count: int) -> tuple[float, ...]:
    """Return cumulative weights 1, 1/2, 1/3, …: Zipf's law."""
    return tuple(accumulate(1 / rank for rank in range(1, count + 1)))


# --- bad messages ----------------------------------------------------------------------------------

Fields = dict[str, Any]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _without(name: str) -> Callable[[Fields], bytes]:
    return lambda fields: _json({key: value for key, value in fields.items() if key != name})


def _with(name: str, value: Any) -> Callable[[Fields], bytes]:
    return lambda fields: _json({**fields, name: value})


#: Ways to spoil a good message, by the reason that its dead letter gives. No result contains a newline.
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
    """A bad payload, made from the fields of a good message."""
    return rng.choice(SPOILING[rng.choice(list(SPOILING))])(fields)


# --- generator -------------------------------------------------------------------------------------

#: 2025-01-01; fixed, so that a seed gives the same messages every day.
START_MS: Final = 1_735_689_600_000
SPAN_MS: Final = 30 * 86_400_000
#: Fractions of the messages.
METADATA_PART: Final = 0.04
REPEATED_PART: Final = 0.002
LATE_PART: Final = 0.05
MAX_LATE_MS: Final = 600_000
#: Runs in progress at a time.
RUNS_AT_ONCE: Final = 12


@dataclass
class _Run:
    program: Program
    run: str
    user: str
    left: list[tuple[str, str]]


@dataclass
class _Metadata:
    properties: dict[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"properties": dict(self.properties), "tags": list(self.tags)}


def payloads(messages: int, seed: int, *, bad: float = 0.0) -> Iterator[bytes]:
    """Payloads in publication order; a fraction ``bad`` of them cannot be read.

    Args:
      messages: the number of payloads, including bad and repeated ones.
    """
    rng = random.Random(seed)
    last = b""
    events = _events(rng, make_world(rng), messages)
    for _ in range(messages):
        if rng.random() < bad:
            yield spoiled(rng, next(events))
        elif last and rng.random() < REPEATED_PART:
            yield last
        else:
            last = json.dumps(next(events), separators=(",", ":"), ensure_ascii=False).encode()
            yield last


def _events(rng: random.Random, world: World, messages: int) -> Iterator[dict[str, Any]]:
    """Yield events without end; the first ``messages`` of them fill the time span."""
    runs: list[_Run] = []
    metadata: dict[str, _Metadata] = {}
    number = 0
    while True:
        now_ms = START_MS + SPAN_MS * min(number, messages) // max(messages, 1)
        late_ms = rng.randrange(MAX_LATE_MS) if rng.random() < LATE_PART else 0
        common = {"version": 1, "time": max(START_MS, now_ms - late_ms), "namespace": world.namespace}
        number += 1
        if rng.random() < METADATA_PART:
            yield {**common, **_edit(rng, world, metadata)}
            continue
        if len(runs) < RUNS_AT_ONCE:
            runs.append(_begin(rng, world))
        run = rng.choice(runs)
        dataset, access = run.left.pop()
        if not run.left:
            runs.remove(run)
        yield {
            **common,
            "type": "access",
            "user": run.user,
            "program": run.program.name,
            "run": run.run,
            "dataset": dataset,
            "access": access,
        }


def _begin(rng: random.Random, world: World) -> _Run:
    """A run with its future accesses in reverse order: reads, then writes, some of them repeated."""
    program = world.some_program(rng)
    reads = [(name, "read") for name in program.inputs for _ in range(rng.choice((1, 1, 1, 2, 5)))]
    writes = [(name, "write") for name in program.outputs for _ in range(rng.choice((1, 1, 2)))]
    unknown = [(world.some_dataset(rng), "unknown")] if rng.random() < 0.05 else []
    user = program.owner if rng.random() < 0.9 else world.some_user(rng)
    return _Run(program, f"{rng.getrandbits(128):032x}", user, [*reversed([*reads, *unknown, *writes])])


def _edit(rng: random.Random, world: World, metadata: dict[str, _Metadata]) -> dict[str, Any]:
    """Make an event in which a user adds or removes a property or a tag of an entity."""
    entity = f"dataset:{world.some_dataset(rng)}" if rng.random() < 0.8 else f"program:{world.some_program(rng).name}"
    has = metadata.setdefault(entity, _Metadata())
    previous = has.as_json()
    added: dict[str, Any] = {"properties": {}, "tags": []}
    removed: dict[str, Any] = {"properties": {}, "tags": []}
    what = rng.random()
    if what < 0.5:
        key = rng.choice(("owner", "quality", "retention", "source", "übersicht"))
        if key in has.properties:
            removed["properties"][key] = has.properties[key]
        added["properties"][key] = has.properties[key] = (
            f"{rng.choice(('low', 'high', 'new', 'old'))}-{rng.randrange(100)}"
        )
    elif what < 0.8 or not has.tags:
        tag = rng.choice(("raw", "pii", "gold", "deprecated", "daily", "reviewed"))
        if tag not in has.tags:
            has.tags.append(tag)
            added["tags"].append(tag)
    else:
        removed["tags"].append(has.tags.pop(rng.randrange(len(has.tags))))
    changes = {"previous": previous, "added": added, "removed": removed}
    return {"type": "metadata", "user": world.some_user(rng), "entity": entity, **changes}
