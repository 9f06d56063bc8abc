"""Writes docs/reference from the code: the public API, with signatures and docstrings, as Markdown.

    python scripts/reference.py            writes the pages
    python scripts/reference.py --check    exits with 1 if a page is outdated

Griffe reads the sources without importing them, so no page depends on what is installed; only the types of answers are
imported, which have no dependencies. Docstrings have the sections of Google's style: Args, Returns, Raises.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import griffe

from plainsong.protocol.answers import messages, service, topics
from plainsong.protocol.answers.fields import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/reference"
#: Longer signatures have a line for each parameter.
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its file, title and introduction, and its contents by heading."""

    file: str
    title: str
    about: str
    parts: dict[str, tuple[str, ...]]
    errors: str = ""
    """The module whose errors are listed at its end."""


PAGES = (
    Page(
        "client.md",
        "The client",
        "[The guide](../client.md) explains how these belong together. `AsyncClient` and the objects it makes have the same"
        " methods, to be awaited, on asyncio and trio.",
        {
            "Client": ("plainsong._sync.client.Client", "plainsong._sync.client.Topic"),
            "Administration": ("plainsong._sync.administration.Administration",),
            "Publishing": (
                "plainsong._sync.publisher.Publisher",
                "plainsong._sync.stream.Stream",
                "plainsong._sync.producer.Producer",
                "plainsong._sync.producer.LightweightTransaction",
            ),
            "Reading": (
                "plainsong._sync.read.Reader",
                "plainsong.positions.FilePosition",
                "plainsong.positions.ServerPosition",
            ),
            "Transactions": (
                "plainsong._sync.transaction.TransactionContext",
                "plainsong.participants.TransactionAware",
                "plainsong._sync.transactions.Transactions",
                "plainsong.transactions.Transaction",
                "plainsong.transactions.TransactionStatus",
            ),
            "Chained topics": (
                "plainsong.chains.ChainHead",
                "plainsong.chains.ChainReport",
                "plainsong.chains.ChainFault",
            ),
            "Traces": ("plainsong.tracing.processing",),
            "Namespaces": ("plainsong._sync.administration.Namespaces",),
            "Values": (
                "plainsong.messages.Message",
                "plainsong.messages.MessageId",
                "plainsong.messages.Page",
                "plainsong.protocol.page.Held",
                "plainsong.messages.Outgoing",
                "plainsong.messages.Receipt",
                "plainsong.messages.MessageReceipt",
                "plainsong.protocol.requests.PublishResponse",
                "plainsong.messages.Seen",
                "plainsong.messages.Counts",
                "plainsong.messages.DroppedMessage",
                "plainsong.messages.ServiceEvent",
                "plainsong.serializers.Serializer",
                "plainsong.serializers.Undecodable",
                "plainsong.serializers.dataclass_json",
            ),
        },
    ),
    Page(
        "sql.md",
        "plainsong.sql",
        "[Rows and messages together](../sql.md) is the guide. It needs `plainsong-client[sql]`.",
        {
            "Transactions with rows": (
                "plainsong.sql.participant.SqlParticipant",
                "plainsong.sql.prepared.recover",
                "plainsong.sql.prepared.Recovery",
                "plainsong.sql.prepared.Found",
            ),
            "Positions": ("plainsong.sql.positions.SqlPosition", "plainsong.sql.positions.positions_table"),
            "The outbox": (
                "plainsong.sql.outbox.Outbox",
                "plainsong.sql.outbox.create_outbox",
                "plainsong.sql.outbox.outbox_tables",
                "plainsong.sql.relay.Relay",
                "plainsong.sql.relay.outbox_status",
                "plainsong.sql.relay.OutboxStatus",
                "plainsong.sql.relay.TopicStatus",
            ),
        },
        errors="plainsong.sql.errors",
    ),
    Page(
        "testing.md",
        "plainsong.testing",
        "[How to test your program](../howto/testing.md) shows it at work. It needs `plainsong-server`, in any environment.",
        {
            "A daemon for a test": (
                "plainsong.testing.broker",
                "plainsong.testing.Broker",
                "plainsong.testing.Clock",
                "plainsong.testing.Faults",
            ),
            "Fixtures of pytest": (
                "plainsong.testing.plugin.plainsong_client",
                "plainsong.testing.plugin.plainsong_broker",
            ),
            "When it cannot run": ("plainsong.testing.DaemonNotInstalled", "plainsong.testing.DaemonFailed"),
        },
    ),
)

_PACKAGES: dict[str, griffe.Object] = {}


def found(path: str) -> griffe.Object:
    """The class, function or attribute at a dotted path."""
    if not _PACKAGES:
        logging.getLogger("griffe").setLevel(logging.ERROR)
        loaded = griffe.load("plainsong", search_paths=[ROOT], docstring_parser="google")
        assert isinstance(loaded, griffe.Object)
        _PACKAGES["plainsong"] = loaded
    target = _PACKAGES["plainsong"][path.removeprefix("plainsong.")]
    return target.final_target if isinstance(target, griffe.Alias) else target


# --- pages ---------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """The text of each page, by its file."""
    written = {page.file: "\n".join(_page(page)) for page in PAGES}
    written["answers.md"] = "\n".join(_answers(written["client.md"]))
    written["errors.md"] = "\n".join(_errors())
    written["index.md"] = "\n".join(_index())
    return written


def _index() -> Iterator[str]:
    yield "# API reference\n"
    yield "Written from the code by `scripts/reference.py`; a test compares them. The guides say how to use it.\n"
    yield "| page | has |\n|---|---|"
    for page in PAGES:
        names = ", ".join(f"`{path.rpartition('.')[2]}`" for paths in page.parts.values() for path in paths[:2])
        yield f"| [{page.title}]({page.file}) | {names} … |"
    yield "| [plainsong.protocol.answers](answers.md) | the dictionaries that administration returns |"
    yield "| [plainsong.errors](errors.md) | every error, by what it derives from |"
    yield "\nThe interface of the daemon itself is HTTP: [docs/http.md](../http.md), and `/openapi.json` of a running one.\n"


def _page(page: Page) -> Iterator[str]:
    yield f"# {page.title}\n"
    yield f"{page.about}\n"
    for heading, paths in page.parts.items():
        yield f"## {heading}\n"
        for path in paths:
            yield from _thing(path)
    if page.errors:
        yield "## Errors\n"
        yield from _error_rows(_by_base(_error_classes(page.errors)), "", 0, "")
        yield ""


def _thing(path: str) -> Iterator[str]:
    thing = found(path)
    yield f"### {thing.name}\n"
    if isinstance(thing, griffe.Function):
        yield from _function(thing, thing.name)
        return
    assert isinstance(thing, griffe.Class), path
    constructor = thing.all_members.get("__init__")
    if isinstance(constructor, griffe.Function) and not _is_made_by_others(thing):
        yield _code(_signature(constructor, thing.name, with_returns=False))
    yield from _docstring(thing)
    attributes = [each for each in _members(thing) if isinstance(each, griffe.Attribute)]
    described = [each for each in attributes if each.annotation is not None or _cell(each)]
    if described:
        yield "| attribute | type | is |\n|---|---|---|"
        yield from (f"| `{each.name}` | {_type(each.annotation)} | {_cell(each)} |" for each in described)
        yield ""
    for each in _members(thing):
        if isinstance(each, griffe.Function):
            yield f"#### {thing.name}.{each.name}\n"
            yield from _function(each, each.name)


def _is_made_by_others(thing: griffe.Class) -> bool:
    """True if users get its objects from methods, and never construct one."""
    return thing.name in MADE_BY_OTHERS


MADE_BY_OTHERS = {
    "Administration",
    "Broker",
    "Clock",
    "Counts",
    "DaemonFailed",
    "DaemonNotInstalled",
    "DroppedMessage",
    "Faults",
    "Found",
    "Held",
    "LightweightTransaction",
    "MessageReceipt",
    "Namespaces",
    "OutboxStatus",
    "Page",
    "Producer",
    "PublishResponse",
    "Publisher",
    "Reader",
    "Receipt",
    "Recovery",
    "Seen",
    "ServiceEvent",
    "Stream",
    "Topic",
    "TopicStatus",
    "TransactionContext",
    "TransactionStatus",
    "Transactions",
    "Undecodable",
}


def _members(thing: griffe.Class) -> list[griffe.Object]:
    """The public members of a class, its own first and then the inherited ones, in the order of the source."""
    own = [each for each in thing.all_members.values() if not each.name.startswith("_") and _made_by(each) not in MOVED]
    resolved = [_unbound(each.final_target if isinstance(each, griffe.Alias) else each) for each in own]
    return [each for each in resolved if each.docstring is not None or isinstance(each, griffe.Attribute)]


#: Names from the previous version: the reference shows what replaced them.
MOVED = ("moved", "moved_property")


def _made_by(each: griffe.Object | griffe.Alias) -> str:
    """The function whose call is the value of an attribute; empty if there is none."""
    target = each.final_target if isinstance(each, griffe.Alias) else each
    value = target.value if isinstance(target, griffe.Attribute) else None
    return str(value.function) if isinstance(value, griffe.ExprCall) else ""


def _unbound(each: griffe.Object) -> griffe.Object:
    """The method that ``of_topic`` or ``of_administration`` makes from another one; anything else unchanged."""
    if _made_by(each) not in ("of_topic", "of_administration"):
        return each
    assert isinstance(each, griffe.Attribute)
    value = each.value
    assert isinstance(value, griffe.ExprCall)
    called = value.arguments[0]
    assert isinstance(called, griffe.Expr)
    method = found(called.canonical_path)
    assert isinstance(method, griffe.Function)
    return griffe.Function(
        each.name,
        parameters=griffe.Parameters(*[parameter for parameter in method.parameters if parameter.name != "topic"]),
        returns=method.returns,
        docstring=griffe.Docstring(f"``{called}``, of this topic."),
        parent=method.parent,  # type: ignore[arg-type] # where its annotations and defaults are looked up
    )


def _function(thing: griffe.Function, name: str) -> Iterator[str]:
    yield _code(_signature(thing, name))
    yield from _docstring(thing)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def _signature(thing: griffe.Function, name: str, *, with_returns: bool = True) -> str:
    """The signature as in the source, without ``self``."""
    parameters: list[str] = []
    starred = False
    for each in thing.parameters:
        if each.name in ("self", "cls") and not parameters:
            continue
        if each.kind is griffe.ParameterKind.keyword_only and not starred:
            parameters.append("*")
        starred = starred or each.kind in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        stars = STARS.get(each.kind, "") if each.kind is not None else ""
        annotated = f"{stars}{each.name}" + (f": {each.annotation}" if each.annotation is not None else "")
        default = each.default if not stars else None
        parameters.append(annotated + (f" = {_value(default)}" if default is not None else ""))
        if each.kind is griffe.ParameterKind.positional_only and not _more_positional_only(thing, each):
            parameters.append("/")
    returns = f" -> {thing.returns}" if with_returns and thing.returns is not None else ""
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){returns}"


def _value(default: str | griffe.Expr) -> str:
    """A default value as shown to readers: a constant's value rather than its name."""
    if isinstance(default, (griffe.ExprName, griffe.ExprAttribute)) and str(default).rpartition(".")[2].isupper():
        constant = found(default.canonical_path)
        if isinstance(constant, griffe.Attribute) and constant.value is not None and len(str(constant.value)) < 40:
            return str(constant.value).replace("'", '"')
    return str(default).replace("'", '"')


def _more_positional_only(thing: griffe.Function, this: griffe.Parameter) -> bool:
    names = [each.name for each in thing.parameters if each.kind is griffe.ParameterKind.positional_only]
    return bool(names) and names[-1] != this.name


# --- docstrings ----------------------------------------------------------------------------------


def _docstring(thing: griffe.Object) -> Iterator[str]:
    if thing.docstring is None:
        return
    # Griffe recognizes a section by the empty line before it.
    text = re.sub(r"\n(?=(?:Args|Returns|Raises):\n)", "\n\n", thing.docstring.value)
    for section in griffe.Docstring(text, parent=thing).parse("google", warnings=False):
        kind = section.kind
        if kind is griffe.DocstringSectionKind.text:
            yield f"{_markdown(section.value)}\n"
        elif kind is griffe.DocstringSectionKind.parameters:
            yield "\n".join(f"* {_names(each.name)}: {_line(each.description)}" for each in section.value) + "\n"
        elif kind is griffe.DocstringSectionKind.raises:
            lines = [f"* {_names(str(each.annotation))}: {_line(each.description)}" for each in section.value]
            yield "Raises:\n\n" + "\n".join(lines) + "\n"
        elif kind is griffe.DocstringSectionKind.returns:
            yield "Returns: " + "; ".join(_line(each.description) for each in section.value) + "\n"
        elif kind is griffe.DocstringSectionKind.examples:
            yield _code("\n".join(str(value) for _, value in section.value))
        else:  # otherwise a section of a new kind would be lost silently
            raise ValueError(f"{thing.path}: no way to write a section {kind}")


def _names(text: str) -> str:
    """Put a list of names into backticks; return a sentence unchanged, as Markdown."""
    names = [name.strip() for name in text.strip("()").split(",")]
    if all(map(str.isidentifier, names)):
        return ", ".join(f"`{name}`" for name in names)
    return re.sub(r"(?<=\w)\.(?=[A-Z])", ". ", _line(text.strip("()")))


def _markdown(text: str) -> str:
    """A docstring's text as Markdown, with its indented blocks as code blocks."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            paragraphs.append("```python\n" + re.sub(r"^    ", "", paragraph, flags=re.MULTILINE) + "\n```")
        else:
            paragraphs.append(_line(paragraph))
    return "\n\n".join(paragraphs)


def _line(text: str) -> str:
    joined = re.sub(r"\s*\n\s*(?!\* )", " ", text.strip())
    return re.sub(r"``(.+?)``", r"`\1`", joined)


def _type(annotation: object) -> str:
    return f"`{annotation}`".replace("|", "\\|") if annotation is not None else ""


def _cell(thing: griffe.Attribute) -> str:
    """The description of an attribute, for a table's cell: its docstring, or the ``#:`` comments above it."""
    said = thing.docstring.value if thing.docstring else _comment(thing)
    return _line(said).replace("|", "\\|")


def _comment(thing: griffe.Attribute) -> str:
    assert isinstance(thing.filepath, Path)
    if thing.lineno is None:
        return ""
    lines: list[str] = []
    for line in reversed(thing.filepath.read_text(encoding="utf-8").splitlines()[: thing.lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        lines.insert(0, line.strip().removeprefix("#:").strip())
    return " ".join(lines)


# --- errors --------------------------------------------------------------------------------------


def _errors() -> Iterator[str]:
    yield "# plainsong.errors\n"
    yield (
        "Every error is a `PlainsongError` with `code`, `outcome` (`not-applied`, `applied` or `unknown`), `detail` and"
        " `hint`. Catch a class to catch those below it. [Troubleshooting](../troubleshooting.md) says what to do about"
        " each.\n"
    )
    yield from _error_rows(_by_base(_error_classes("plainsong.protocol.errors", "plainsong.errors")), "", 0, "internal")
    yield ""


def _error_classes(*homes: str) -> dict[str, griffe.Class]:
    """The error classes of these modules, by name."""
    members = [each for home in homes for each in found(home).members.values()]
    return {each.name: each for each in members if isinstance(each, griffe.Class) and not each.name.startswith("_")}


def _by_base(classes: dict[str, griffe.Class]) -> dict[str, list[griffe.Class]]:
    """The subclasses of each class, by its name; under "" those that derive from none of them."""
    children: dict[str, list[griffe.Class]] = {}
    for each in classes.values():
        base = next((str(base) for base in each.bases if str(base) in classes), "")
        children.setdefault(base, []).append(each)
    return children


def _first_sentence(thing: griffe.Object) -> str:
    return re.split(r"(?<=[.]) ", _line(thing.docstring.value if thing.docstring else ""))[0].rstrip(".")


def _error_rows(children: dict[str, list[griffe.Class]], name: str, depth: int, inherited: str) -> Iterator[str]:
    for each in children.get(name, []):
        declared = each.members.get("code")
        value = declared.value if isinstance(declared, griffe.Attribute) else None
        code = str(value).strip("\"'") if value is not None else inherited
        yield f"{'    ' * depth}* `{each.name}` (`{code}`): {_first_sentence(each)}"
        yield from _error_rows(children, each.name, depth + 1, code)


# --- answers -------------------------------------------------------------------------------------


def _returned(client: str) -> list[Any]:
    """The dictionaries that methods on the page of the client return, in the order of ``plainsong.protocol.answers``."""
    every = (each for module in (topics, messages, service) for each in vars(module).values())
    return [each for each in every if is_typeddict(each) and re.search(rf"-> .*\b{each.__name__}\b", client)]


def _answers(client: str) -> Iterator[str]:
    yield "# plainsong.protocol.answers\n"
    yield (
        "The dictionaries that methods of the [client](client.md) return, for type checkers: each has the names"
        " of the JSON of the [HTTP interface](../http.md), which says more about them.\n"
    )
    seen: list[Any] = []
    waiting = _returned(client)
    while waiting:
        shape = waiting.pop(0)
        if shape in seen:
            continue
        seen.append(shape)
        inner: list[Any] = []
        yield f"### {shape.__name__}\n"
        yield f"{_line(shape.__doc__ or '')}\n"
        yield "| field | type | is |\n|---|---|---|"
        for name, field in get_type_hints(shape, include_extras=True).items():
            marks = [*_descriptions(field)]
            about = [*([] if name in shape.__required_keys__ else ["may be absent"]), *marks[-1:]]
            yield f"| `{name}` | {_type(_shape(field, inner))} | {'; '.join(about)} |"
        yield ""
        waiting = inner + waiting


def _shape(field: Any, inner: list[Any]) -> str:
    """A type as it is written in code; adds the dictionaries in it to ``inner``."""
    origin, parameters = get_origin(field), get_args(field)
    if origin in (Annotated, NotRequired):
        return _shape(parameters[0], inner)
    if origin is Literal:
        return ", ".join(map(repr, parameters))
    if origin in (Union, UnionType):
        return " | ".join(_shape(each, inner) for each in parameters)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_shape(each, inner) for each in parameters)}]"
    if is_typeddict(field):
        inner.append(field)
    return "None" if field is NoneType else str(field.__name__)


def _descriptions(field: Any) -> Iterator[str]:
    """The descriptions of a field, and of its value if it may be None. The last one takes precedence."""
    if get_origin(field) in (NotRequired, Union, UnionType):
        for each in get_args(field):
            yield from _descriptions(each)
    for mark in getattr(field, "__metadata__", ()):
        if isinstance(mark, Json) and "description" in mark.keywords:
            yield str(mark.keywords["description"])


# --- the command line ----------------------------------------------------------------------------


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Writes docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page would change")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        text = text.rstrip() + "\n"
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    print("\n".join(stale) if stale else "docs/reference is up to date")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
