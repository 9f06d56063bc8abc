"""The console: static files for a browser, answered with headers that let nothing else in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from broker.http.messages import Answer
from plainsong.protocol.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.http.messages import Request

FILES = Path(__file__).parents[1] / "console"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
#: A browser may load scripts, styles and data from this daemon, and nothing from anywhere else; no script may be made of
#: data, and no other page may frame this one or keep a handle of it.
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)
#: Paths below ``/console/`` that are pages: one file shows them all, and each can be loaded directly.
_PAGE = re.compile(r"(topics|producers)/[^/]+/[^/]+|transactions|cluster|audit|lineage")


class _File(NamedTuple):
    content: bytes
    content_type: str
    etag: str


@cache
def files() -> Mapping[str, _File]:
    """Every file by its path, read once."""
    found = {}
    for path in FILES.rglob("*"):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            # Weak: the same file may leave compressed.
            etag = f'W/"{sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(FILES).as_posix()] = _File(content, _TYPES[path.suffix], etag)
    return found


@dataclass(frozen=True, slots=True)
class Console:
    """The routes of the console's files. Data comes from the other routes, under the rules that hold there."""

    enabled: bool
    """``console.enabled``."""

    async def page(self, request: Request) -> Answer:
        """The first page. Raises NotFound where the console is switched off."""
        return await self._answer("index.html", request)

    async def lead_on(self, request: Request) -> Answer:
        """To the first page: people type a slash behind it. Raises NotFound where the console is switched off."""
        self._require()
        query = f"?{request.query}" if request.query else ""
        return Answer(308, headers=[*HEADERS, ("Location", f"/console{query}")])

    async def root(self, request: Request) -> Answer:
        """To the first page, for a browser. Raises NotFound for any other client, or where the console is switched off."""
        if self.enabled and "text/html" in request.headers.get("accept", "").lower():
            return Answer(307, headers=[*HEADERS, ("Location", "/console"), ("Vary", "Accept")])
        raise NotFound("there is nothing at /", hint="the console is at /console, and /openapi.json lists the routes")

    async def file(self, request: Request) -> Answer:
        """A page, or a file of one. The query is the page's own. Raises NotFound."""
        path = request.path["file"]
        return await self._answer("index.html" if _PAGE.fullmatch(path) else path, request)

    async def _answer(self, name: str, request: Request) -> Answer:
        self._require()
        found = (await trio.to_thread.run_sync(files)).get(name)
        if found is None:
            raise NotFound(f"the console has no {name[:80]!r}", hint="it begins at /console")
        headers = [*HEADERS, ("ETag", found.etag)]
        if _names(request.headers.get("if-none-match", ""), found.etag):
            return Answer(304, headers=headers)
        return Answer(200, found.content, found.content_type, headers)

    def _require(self) -> None:
        if not self.enabled:
            raise NotFound("the console is switched off", hint="console.enabled = true switches it on")


def _names(if_none_match: str, etag: str) -> bool:
    """Whether the header names this tag, weakly compared."""
    opaque = etag.removeprefix("W/")
    named = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return opaque in named or "*" in named
