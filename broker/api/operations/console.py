"""The console: static files for a browser, with headers that forbid content from other origins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from broker.http.messages import Answer
from plainsong.protocol.errors import NotFound
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.http.messages import Request

FILES = Path(__file__).parents[2] / "console"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
#: A browser may load scripts, styles and data from this daemon only. Scripts cannot be created from text, and no other
#: page may frame this one or keep a reference to it.
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
#: Paths below ``/console/`` that are pages. One file shows them all, and each can be loaded directly.
_PAGE = re.compile(r"(topics|producers)/[^/]+/[^/]+|transactions|cluster|audit|lineage")


class _File(NamedTuple):
    content: bytes
    content_type: str
    etag: str


@cache
def files() -> Mapping[str, _File]:
    """Return every file by its path; reads them once."""
    found = {}
    for path in FILES.rglob("*"):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            # Weak: the file may be sent compressed.
            etag = f'W/"{sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(FILES).as_posix()] = _File(content, _TYPES[path.suffix], etag)
    return found


@dataclass(frozen=True, slots=True)
class Console:
    """The routes of the console's files. Data comes from the other routes, with their checks."""

    enabled: bool
    """``console.enabled``."""

    async def page(self, request: Request) -> Answer:
        """Return the first page. Raises NotFound if the console is disabled."""
        return await self._answer("index.html", request)

    async def redirect(self, request: Request) -> Answer:
        """Redirect ``/console/`` to the first page. Raises NotFound if the console is disabled."""
        self._require()
        query = f"?{request.query}" if request.query else ""
        return Answer(308, headers=[*HEADERS, ("Location", f"/console{query}")])

    async def root(self, request: Request) -> Answer:
        """Redirect a browser to the first page. Raises NotFound for other clients, or if the console is disabled."""
        if self.enabled and "text/html" in request.headers.get("accept", "").lower():
            return Answer(307, headers=[*HEADERS, ("Location", "/console"), ("Vary", "Accept")])
        raise NotFound("there is nothing at /", hint="the console is at /console, and /openapi.json lists the routes")

    async def file(self, request: Request) -> Answer:
        """Return a page, or one of its files. The query is for the page's script. Raises NotFound."""
        path = request.path["file"]
        return await self._answer("index.html" if _PAGE.fullmatch(path) else path, request)

    async def _answer(self, name: str, request: Request) -> Answer:
        self._require()
        found = (await in_thread(files)).get(name)
        if found is None:
            raise NotFound(f"the console has no page or file {name[:80]!r}", hint="the console starts at /console")
        headers = [*HEADERS, ("ETag", found.etag)]
        if _names(request.headers.get("if-none-match", ""), found.etag):
            return Answer(304, headers=headers)
        return Answer(200, found.content, found.content_type, headers)

    def _require(self) -> None:
        if not self.enabled:
            raise NotFound("the console is switched off", hint="set console.enabled = true")


def _names(if_none_match: str, etag: str) -> bool:
    """True if the header has this tag, by weak comparison."""
    opaque = etag.removeprefix("W/")
    named = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return opaque in named or "*" in named
