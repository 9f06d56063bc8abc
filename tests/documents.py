"""Reads the documents for tests: their text, links, code blocks and shell commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The text of every document, by its path from the root.
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "examples/README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_PATH = re.compile(
    r"(?:protocol|storage|actors|broker|plainsong|pyspark_plainsong|pipeline|tests|bench|examples|etc|docs)/[\w./@-]*"
)
_FOLDER = re.compile(r"[\w./]+/(?=\s)")
_SPAN = re.compile(r"`([^`\n]+)`")


def write_generated(name: str, markdown: str) -> None:
    """Replace the text between the markers with this name in docs/reliability.md."""
    path = ROOT / "docs/reliability.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    document = path.read_text(encoding="utf-8")
    replaced = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{markdown}\n\n{end}", document, flags=re.DOTALL)
    path.write_text(replaced, encoding="utf-8")


def generated(name: str) -> str:
    """Return the text between the markers with this name in docs/reliability.md."""
    document = DOCUMENTS["docs/reliability.md"]
    return document.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]


def prose(text: str) -> str:
    """Return ``text`` without its fenced blocks."""
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Return the targets of a document's links."""
    return _LINK.findall(prose(text))


def spans(text: str) -> list[str]:
    """Return the inline code spans outside fenced blocks."""
    return _SPAN.findall(prose(text))


def paths(text: str) -> list[str]:
    """Return the files and folders of the repository that a document names, in backticks or in a directory listing."""
    named = [span for span in spans(text) if _PATH.fullmatch(span)]
    drawn = [fence["body"].splitlines() for fence in _FENCE.finditer(text) if not fence["info"]]
    return named + [found[0] for lines in drawn for line in lines if (found := _FOLDER.match(line))]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block and its position."""

    info: str
    body: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """Return all fenced blocks, in order."""
    return [Block(fence["info"], fence["body"], fence.start(), fence.end()) for fence in _FENCE.finditer(text)]


def shell_lines(text: str) -> list[str]:
    """Return the lines of all ``sh`` blocks."""
    return [line for fence in _FENCE.finditer(text) if fence["info"] == "sh" for line in fence["body"].splitlines()]


def shell_block(text: str, after: str) -> list[str]:
    """Return the lines of the ``sh`` block right after a sentence such as ``In a second terminal:``."""
    sentence = text.index(after) + len(after)
    fence = _FENCE.search(text, sentence)
    assert fence is not None, after
    assert fence["info"] == "sh", after
    assert not text[sentence : fence.start()].strip(), f"there is text between {after!r} and its block"
    return fence["body"].splitlines()


def anchors(text: str) -> set[str]:
    """Return the anchors that links may name: headings in lower case, spaces as hyphens, punctuation removed."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
