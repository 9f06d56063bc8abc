"""A daemon with authentication, and names with tokens for its tests."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.security.files import write_guarded
from broker.security.tokens import TokenEntry, format_tokens, hash_of, id_of, new_token
from tests.broker.broker_in_process import in_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.broker.broker_in_process import InProcess

#: Names with one kind of grant each, except that `operator` has all and `stranger` none.
GRANTS = """format = 1
[[grant]]
to = ["operator"]
verbs = ["all"]
on = ["*:*", "system:*", "service"]
[[grant]]
to = ["writer"]
verbs = ["publish"]
on = ["ns:*"]
[[grant]]
to = ["reader"]
verbs = ["poll"]
on = ["ns:*"]
[[grant]]
to = ["watcher"]
verbs = ["inspect"]
on = ["ns:*", "service"]
[[grant]]
to = ["owner", "other"]
verbs = ["publish", "poll", "transact"]
on = ["ns:*", "service"]
[[grant]]
to = ["narrow"]
verbs = ["poll"]
on = ["ns:a", "shop:x-*"]
"""
#: Values for the variables in routes' paths, except topics: all are valid, and hardly any exist.
PLACES = {
    "namespace": "ns",
    "producer": "p",
    "reader": "r",
    "message": "0" * 40,
    "transaction": "17",
    "instance": "none",
    "backup": "20261122T055514Z-abcdef",
    "digest": "0" * 64,
    "code": "forbidden",
    "file": "main.js",
}
NAMES = ("operator", "writer", "reader", "watcher", "owner", "other", "narrow", "stranger")


@dataclass
class Files:
    """A tokens file, a grants file, and the tokens themselves."""

    folder: Path
    tokens: dict[str, str] = field(default_factory=dict)
    entries: list[TokenEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        source = random.Random(16)
        for name in NAMES:
            self.tokens[name] = new_token(source.choice)
            hashed = hash_of(self.tokens[name])
            self.entries.append(TokenEntry(id_of(hashed), name, hashed, 0, None))
        self.write()
        self.grant(GRANTS)

    @property
    def tokens_path(self) -> Path:
        return self.folder / "tokens.json"

    @property
    def grants_path(self) -> Path:
        return self.folder / "grants.toml"

    def write(self) -> None:
        write_guarded(self.tokens_path, format_tokens(self.entries))

    def grant(self, text: str) -> None:
        write_guarded(self.grants_path, text.encode())

    def change(self, name: str, **changes: Any) -> None:
        from dataclasses import replace

        self.entries = [replace(each, **changes) if each.name == name else each for each in self.entries]
        self.write()

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "security__authentication": "required",
            "security__tokens_file": str(self.tokens_path),
            "security__grants_file": str(self.grants_path),
        }

    def header(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"Authorization": f"Bearer {self.tokens[name]}"}


@dataclass
class Named:
    """A daemon with authentication, in this process."""

    daemon: InProcess
    files: Files

    async def ask(self, name: str | None, method: str, path: str, **more: Any) -> Any:
        """Send a request as ``name`` (None: without a token), and return the answer."""
        headers = {**more.pop("headers", {}), **self.files.header(name)}
        return await self.daemon.http.request(method, path, headers=headers, **more)

    async def head_of(self, name: str | None, method: str, path: str, **more: Any) -> Any:
        """Do the same, but return only the beginning of an endless answer."""
        request = self.daemon.http.build_request(method, path, headers=self.files.header(name), **more)
        answer = await self.daemon.http.send(request, stream=True)
        if "event-stream" not in answer.headers.get("content-type", ""):
            await answer.aread()
        await answer.aclose()
        return answer

    async def reload(self) -> None:
        """Make the daemon reread the files now."""
        files = self.daemon.service.security.files
        for what, path in files._paths.items():
            await files._look_at(what, path)


@asynccontextmanager
async def named(folder: Path, *, listener: str | None = None, **values: Any) -> AsyncIterator[Named]:
    files = Files(folder)
    async with in_process(listener=listener, **{**files.settings, **values}) as daemon:
        yield Named(daemon, files)
