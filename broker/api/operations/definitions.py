"""Definitions: namespaces, topics and pins as one document, exported, and imported as a whole.

An import is checked completely before anything is changed, then applied in order of name, through the routes that make
each change, at its owner. It skips definitions that are already in place, so a failed import can be repeated.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import trio

from broker.api.answers import json_answer
from broker.api.change import NOTHING, change
from broker.http.handlers import answer_of
from broker.http.messages import Answer, flag
from plainsong.protocol.answers.service import DEFINITION_PARTS
from plainsong.protocol.cluster import Placement
from plainsong.protocol.codec.json_values import parse_json
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import Conflict, Forbidden, InvalidParameter, MalformedBody, PlainsongError, nearest
from plainsong.protocol.keys import DamagedRow, topic_of, topic_range
from plainsong.protocol.names import TopicName, instance_name, namespace_name, topic_name
from plainsong.protocol.plurals import counted
from plainsong.protocol.properties import parse_properties
from plainsong.protocol.records import Metadata
from plainsong.protocol.topic.producer_state import SYSTEM_NAMESPACE
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from actors.namespaces import Namespaces
    from broker.http.messages import Handler, Request
    from broker.membership.membership import Membership
    from broker.security.rights import Rights
    from plainsong.protocol.answers.service import DefinitionsDocument
    from storage.base import Row, Store

FORMAT = 1
#: The largest document: about a hundred thousand topics.
MAX_BODY_BYTES = 16 << 20
TOML_TYPE = "application/toml"
#: The time that the standard library's parser takes for a key grows with the square of the number of its parts: half a
#: minute for a key of 40 KB. Each part but the first has a dot, and no key spans two lines. This many take half a
#: second.
MAX_SQUARED_DOTS = 5_000_000
_NO_PROPERTIES = {"deduplication": "inherit"}
#: Effects of a change on existing messages.
_LOSSES = ("hides", "removes")
#: Topics asked concurrently for the effect of a change.
_TOPICS_AT_ONCE = 16
Verdict = Literal["created", "changed", "deleted", "unchanged"]


@dataclass(slots=True)
class Document:
    """Properties of namespaces and topics, and the instances of pinned topics."""

    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)

    def shown(self) -> DefinitionsDocument:
        """Return the document for JSON, sorted by name."""
        return {
            "format": FORMAT,
            "namespaces": dict(sorted(self.namespaces.items())),
            "topics": dict(sorted(self.topics.items())),
            "pins": dict(sorted(self.pins.items())),
        }

    @property
    def paths(self) -> list[str]:
        """The paths of all definitions: ``topics/shop:orders``."""
        return [f"{part}/{name}" for part in DEFINITION_PARTS for name in getattr(self, part)]


class Step(NamedTuple):
    """An import's change of one definition."""

    part: str
    name: str
    verdict: Verdict
    before: Any
    after: Any

    @property
    def path(self) -> str:
        """Its path in a document: ``topics/shop:orders``."""
        return f"{self.part}/{self.name}"

    @property
    def loses_messages(self) -> bool:
        """True if readers may lose messages."""
        if self.part != "topics":
            return False
        return self.verdict == "deleted" or (self.verdict == "changed" and self.after["ttl"] < self.before["ttl"])


@dataclass(frozen=True, slots=True)
class Definitions:
    """The routes of definitions. Topics of the namespace ``system`` belong to the daemon, and are never included."""

    store: Store
    namespaces: Namespaces
    membership: Membership | None
    default_ttl_s: int
    handlers: Mapping[str, Handler]
    """The handlers of routes by name; each request is answered at its owner."""

    async def show(self, request: Request) -> Answer:
        """Return all definitions, in the form that an import takes. Raises StoreError."""
        request.parameters()
        now = await self._now()
        return await in_thread(lambda: json_answer(now.shown()))

    async def put(self, request: Request) -> Answer:
        """Import the document; with ``prune`` also delete everything it does not name, or only topics of one namespace.

        Raises:
          MalformedBody, InvalidParameter, InvalidName, InvalidProperty, Forbidden, Conflict: nothing happened.
          any error of a change: the changes before it were made.
        """
        given = request.parameters("dryRun", "prune", "namespace")
        scope, rights = _scope(given), request.rights
        self._check_scope(rights, scope)
        # In a thread: a large document takes a good part of a second.
        wanted = await in_thread(self._parsed, request)
        self._check(rights, wanted.paths)
        steps = _plan(await self._now(), wanted, scope)
        self._check(rights, [step.path for step in steps if step.verdict == "deleted"])
        lists = {
            verdict: [step.path for step in steps if step.verdict == verdict]
            for verdict in ("created", "changed", "deleted", "unchanged")
        }
        changes = [step for step in steps if step.verdict != "unchanged"]
        dry_run = flag(given, "dryRun")
        effects = await self._preview(request, changes) if dry_run else await self._make(request, changes)
        answer = change(
            "definitions.import",
            "service",
            {step.path: _as_shown(step.before) for step in changes if step.before is not None},
            {step.path: _as_shown(step.after) for step in changes if step.after is not None},
            dry_run,
            {**lists, **_summed(effects)},
            _warnings(changes, effects, dry_run=dry_run),
        )
        answer["changed"] = [step.path for step in changes]  # in the order of the changes
        return json_answer(answer if dry_run else {**answer, **lists})

    async def _preview(self, request: Request, changes: list[Step]) -> dict[str, Any]:
        """Ask the owners of topics that would lose messages for the effect."""
        effects: dict[str, Any] = {}
        limit = trio.CapacityLimiter(_TOPICS_AT_ONCE)

        async def ask(step: Step) -> None:
            async with limit:
                effects[step.name] = await self._apply(request, step, dry_run=True)

        async with trio.open_nursery() as nursery:
            for step in changes:
                if step.loses_messages:
                    nursery.start_soon(ask, step)
        return effects

    async def _make(self, request: Request, changes: list[Step]) -> dict[str, Any]:
        """Make the changes in sequence; return the effects on topics that lost messages."""
        effects: dict[str, Any] = {}
        for number, step in enumerate(changes):
            try:
                effect = await self._apply(request, step)
            except PlainsongError as error:
                error.detail = f"{step.path}: {error.detail}"
                if number:
                    error.detail += f" (changed before: {number} of {len(changes)})"
                    error.hint = error.hint or "import it again: changes already made are skipped"
                    error.outcome = "unknown"
                raise
            if step.loses_messages:
                effects[step.name] = effect
        return effects

    # --- export ----------------------------------------------------------------------------------

    async def _now(self) -> Document:
        found = Document()

        def take(rows: Sequence[Row]) -> bool:
            for key, value in rows:
                try:
                    name, metadata = topic_of(key)[0], Metadata.decode(value)
                except DamagedRow:
                    continue
                if metadata.deleted_ms is None and name.namespace != SYSTEM_NAMESPACE:
                    found.topics[str(name)] = dict(metadata.properties.stored())
            return True

        await self.store.scan(Table.METADATA, *topic_range(), take, first_chunk=1000)
        for namespace in {each.partition(":")[0] for each in found.topics} | set(self.namespaces.policies):
            properties = self.namespaces.properties(namespace)
            if properties != _NO_PROPERTIES and namespace != SYSTEM_NAMESPACE:
                found.namespaces[namespace] = dict(properties)
        placement = Placement() if self.membership is None else self.membership.assignment.placement
        found.pins = dict(placement.pins)
        return found

    # --- import ------------------------------------------------------------------------------------

    def _parsed(self, request: Request) -> Document:
        given = _decoded(request)
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise InvalidParameter(
                f"the definitions need format {FORMAT}", hint='for example {"format": 1, "topics": {"shop:orders": {}}}'
            )
        for key in given:
            if key not in (*DEFINITION_PARTS, "format"):
                raise InvalidParameter(
                    f"the definitions have an unknown part {key[:80]!r}", hint=nearest(key, DEFINITION_PARTS)
                )
        parts = {part: given.get(part, {}) for part in DEFINITION_PARTS}
        for part, value in parts.items():
            if not isinstance(value, dict):
                raise InvalidParameter(f"{part} is not an object with a name for each entry")
        wanted = Document()
        for name, properties in parts["namespaces"].items():
            checked = self.namespaces.checked(properties)
            if checked != _NO_PROPERTIES:
                wanted.namespaces[namespace_name(name)] = {**checked}
        for name, properties in parts["topics"].items():
            parsed = parse_properties(properties, default_ttl_s=self.default_ttl_s)
            wanted.topics[str(_topic(name))] = dict(parsed.stored())
        for name, instance in parts["pins"].items():
            if not isinstance(instance, str):
                raise InvalidParameter(f"the pin of {name[:80]!r} is not the name of an instance")
            wanted.pins[str(_topic(name))] = instance_name(instance)
        return wanted

    def _check_scope(self, rights: Rights, scope: str | None) -> None:
        """Check the right to see what ``prune`` would delete. Raises Forbidden."""
        if scope == EVERYTHING and not rights.on_service("operate"):
            raise _refusal("the service", "`operate` on the service, or name a namespace")
        if scope and scope != EVERYTHING and not rights.on_namespace("admin", scope):
            raise _refusal(f"{scope}:*", f"`admin` on {scope}:*")

    def _check(self, rights: Rights, paths: Iterable[str]) -> None:
        """Check the rights to definitions, whether or not they change: an answer shows whether they do.

        Raises:
          Forbidden: one is missing. Conflict: there is no cluster to pin topics in.
        """
        for path in paths:
            part, _, name = path.partition("/")
            namespace, _, topic = name.partition(":")
            may = rights.on_topic("admin", namespace, topic) if topic else rights.on_namespace("admin", namespace)
            if namespace == SYSTEM_NAMESPACE or not may:
                raise _refusal(path, "`admin` on what is imported")
            if part == "pins" and not rights.on_service("operate"):
                raise _refusal(path, "`operate` on the service")
            if part == "pins" and self.membership is None:
                raise Conflict(f"{path}: a single instance has no pins")

    async def _apply(self, request: Request, step: Step, *, dry_run: bool = False) -> Any:
        """Make one change, or preview it; return its effect, if its route reports one."""
        namespace, _, topic = step.name.partition(":")
        deleted = step.verdict == "deleted"
        body: Any = step.after
        if step.part == "namespaces":
            route, body = "set_namespace", _NO_PROPERTIES if deleted else step.after
        elif step.part == "pins":
            route, body = ("unpin_topic", None) if deleted else ("pin_topic", {"instance": step.after})
        elif deleted:
            route, body = "delete_topic", None
        else:
            route = "create_topic" if step.verdict == "created" else "set_properties"
        path = {"namespace": namespace} | ({"topic": topic} if topic else {})
        sent = b"" if body is None else json.dumps(body).encode()
        headers = {name: value for name, value in request.headers.items() if name not in ("if-match", "content-type")}
        query = "dryRun=true" if dry_run else ""
        asked = replace(request, path=path, query=query, headers=headers, body=sent, decoded=None, room=None)
        answer = await answer_of(self.handlers[route], asked)
        # An owner of an older version reports no effect.
        told = json.loads(answer.body) if isinstance(answer.body, bytes) and answer.body else {}
        return told.get("effect") or {}


def _as_shown(value: Any) -> Any:
    """Return properties as a topic's ``GET`` and dry runs show them, all values strings; other values unchanged."""
    return {name: str(each) for name, each in value.items()} if isinstance(value, dict) else value


#: The scope of a ``prune`` without a namespace.
EVERYTHING = "*"


def _scope(given: dict[str, str]) -> str | None:
    """Return the namespace whose topics are pruned, or ``EVERYTHING``; None if nothing is. Raises InvalidParameter."""
    if not flag(given, "prune"):
        if "namespace" in given:
            raise InvalidParameter("namespace is only for prune=true", hint="add prune=true, or remove it")
        return None
    return namespace_name(given["namespace"]) if "namespace" in given else EVERYTHING


def _refusal(what: str, right: str) -> Forbidden:
    return Forbidden(f"{what}: the caller may not change it", hint=f"grant {right}")


def _plan(now: Document, wanted: Document, scope: str | None) -> list[Step]:
    """Return the steps of an import: namespaces, topics, pins, each sorted by name. ``scope``: see ``_scope``."""
    steps: list[Step] = []
    for part in DEFINITION_PARTS:
        before, after = getattr(now, part), getattr(wanted, part)
        for name in sorted({*before, *after}):
            old, new = before.get(name), after.get(name)
            if new is None:
                verdict: Verdict = "deleted"
                if scope is None or not (scope == EVERYTHING or (part == "topics" and name.startswith(f"{scope}:"))):
                    continue
            elif old is None:
                verdict = "created"
            else:
                verdict = "unchanged" if old == new else "changed"
            steps.append(Step(part, name, verdict, old, new))
    return steps


def _summed(effects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summed effects of all changes, and the topics affected."""
    topics = [
        {"topic": name, **{verb: effect[verb] for verb in _LOSSES if _messages(effect, verb)}}
        for name, effect in sorted(effects.items())
    ]
    totals = {verb: _total([effect[verb] for effect in effects.values() if verb in effect]) for verb in _LOSSES}
    return {**totals, "returns": dict(NOTHING), "topics": [each for each in topics if len(each) > 1]}


def _total(parts: list[Any]) -> dict[str, object]:
    some = [each for each in parts if each["messages"]]
    if not some:
        return dict(NOTHING)
    return {
        "messages": sum(each["messages"] for each in some),
        "bytes": sum(each["bytes"] for each in some),
        "estimated": any(each["estimated"] for each in some),
        "oldestMs": min((each["oldestMs"] for each in some if each["oldestMs"] is not None), default=None),
        "newestMs": max((each["newestMs"] for each in some if each["newestMs"] is not None), default=None),
    }


def _messages(effect: Mapping[str, Any], verb: str) -> int:
    return int(effect.get(verb, NOTHING)["messages"])


def _warnings(changes: list[Step], effects: Mapping[str, Any], *, dry_run: bool) -> list[str]:
    """Return a warning for each topic that is deleted, or loses messages to a shorter ttl."""
    warnings = []
    for step in changes:
        effect = effects.get(step.name, {})
        if not step.loses_messages:
            continue
        if step.verdict == "deleted":
            word = "is" if dry_run else "was"
            warnings.append(f"topic {step.name} {word} deleted with {counted(_messages(effect, 'removes'), 'message')}")
        elif hidden := _messages(effect, "hides"):
            word = "gets" if dry_run else "got"
            warnings.append(f"topic {step.name} {word} a shorter ttl, which hides {counted(hidden, 'message')}")
    return warnings


def _decoded(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != TOML_TYPE:
        return parse_json(request.body) if request.body.strip() else None
    if sum(line.count(b".") ** 2 for line in request.body.split(b"\n")) > MAX_SQUARED_DOTS:
        raise MalformedBody(
            "keys of the definitions are nested too deeply", hint="write each definition in its own line"
        )
    try:
        return tomllib.loads(request.body.decode())
    except ValueError as error:  # includes impossible dates and text that is not UTF-8
        raise MalformedBody(f"the definitions are not valid TOML: {error}") from None
    except RecursionError:
        raise MalformedBody("the definitions are not valid TOML: values are nested too deeply") from None


def _topic(text: str) -> TopicName:
    namespace, colon, topic = text.partition(":")
    if not colon:
        raise InvalidParameter(f"{text[:80]!r} is not a topic", hint="write namespace:topic")
    return topic_name(namespace, topic)
