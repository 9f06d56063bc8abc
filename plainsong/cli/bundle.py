"""The bundle of `doctor --bundle`: facts about a daemon for support, without secrets."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from plainsong import __version__
from plainsong.calls import Failure
from plainsong.cli.about import installed_versions
from plainsong.cli.command import CommandFailed
from plainsong.cli.ping import asking
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.paging import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from plainsong.cli.connection import Where
    from plainsong.cli.ping import Ask

MAX_LOG_LINES = 10_000
#: Bytes of one part; the rest is cut.
MAX_PART_BYTES = 32 << 20
#: Topics whose names are looked up, to be replaced.
MAX_NAMES = 100_000
TIMEOUT_S = 15.0
CONTENTS = "CONTENTS.txt"

_SECRETS = (
    # Our tokens, JSON Web Tokens, secrets of webhooks; the content of an Authorization header; private keys.
    (re.compile(r"psg_[0-9A-Za-z]+"), "psg_***"),
    (re.compile(r"eyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?"), "eyJ***"),
    (re.compile(r"whsec_[A-Za-z0-9+/=]+"), "whsec_***"),
    (re.compile(r"(?i)\b(bearer|basic|digest)(\s+)[A-Za-z0-9+/=._~:-]{4,}"), r"\1\2***"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "***"),
    # The user's part of a URL; values of a query that are named like secrets.
    (re.compile(r"(?<=://)[^/@\s\"']+@"), "***@"),
    (re.compile(r"(?i)([?&](?:access_)?(?:token|key|secret|password)=)[^&\s\"']+"), r"\1***"),
)
#: Settings whose values are secret by their names; those that name files are not.
_SECRET_NAME = re.compile(r"(?i)(secret|password|passwd|token|credential|_key$|\.key$|auth$)")
_FILE_NAME = re.compile(r"(?i)(_file|\.certificate|\.key|_key|_ca|_certificate|_directory|_dir)$")
#: Fields of transactions that may be shown.
_OF_TRANSACTIONS = (
    *("id", "writePointer", "type", "state", "startedMs", "expiresMs", "decidedMs", "topics", "hiddenMessages"),
)
_WORD = re.compile(r"[A-Za-z0-9_-]+")
#: Patterns of topic names in logs, paths and other texts, for names not among the known ones.
_NAMES_IN_TEXT = (
    re.compile(r"(/namespaces/)([A-Za-z0-9_]+)"),
    re.compile(r"(/topics/)([A-Za-z0-9_-]+)"),
    re.compile(r'("(?:topic|namespace)"\s*:\s*")([^"]+)(?=")'),
    re.compile(r"(\b(?:topic|namespace)[= ])([A-Za-z0-9_:-]+)"),
)


def masked(text: str) -> str:
    """Return the text with everything that looks like a credential masked."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def masked_settings(shown: dict[str, Any]) -> dict[str, Any]:
    """Settings by name, each a value or ``{"value", "origin"}``, without secrets."""
    found = {}
    for name, setting in shown.items():
        value = setting["value"] if isinstance(setting, dict) else setting
        is_secret = _SECRET_NAME.search(name) and not _FILE_NAME.search(name) and isinstance(value, str) and value
        kept = "***" if is_secret else masked(value) if isinstance(value, str) else value
        found[name] = {**setting, "value": kept} if isinstance(setting, dict) else kept
    return found


class Names:
    """Replaces names of topics by hashes that are the same within one bundle, and in no other."""

    def __init__(self, names: Iterable[str]) -> None:
        self._key = secrets.token_bytes(32)
        self._known = {part for name in names for part in name.split(":")}

    def replaced(self, text: str) -> str:
        """A text with a hash for each name."""
        text = _WORD.sub(lambda found: self._hash(found[0]) if found[0] in self._known else found[0], text)
        for pattern in _NAMES_IN_TEXT:
            text = pattern.sub(lambda found: found[1] + ":".join(map(self._hash, found[2].split(":"))), text)
        return text

    def replaced_in(self, value: Any) -> Any:
        """A JSON value with hashes in its texts; names of fields stay, unless they are topics' names."""
        if isinstance(value, str):
            return self.replaced(value)
        if isinstance(value, list | tuple):
            return [self.replaced_in(each) for each in value]
        if isinstance(value, dict):
            return {
                self.replaced(name) if ":" in name else name: self._field(name, each) for name, each in value.items()
            }
        return value

    def _field(self, name: str, value: Any) -> Any:
        if name in ("topic", "namespace") and isinstance(value, str):
            return ":".join(map(self._hash, value.split(":")))
        return self.replaced_in(value)

    def _hash(self, name: str) -> str:
        if name == "system" or re.fullmatch(r"name-[0-9a-f]{12}", name):
            return name
        return "name-" + hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()[:12]


@dataclass(slots=True)
class Bundle:
    """The files of a bundle, and a description of each."""

    hides_names: bool
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    names: Names | None = None

    def add(self, name: str, says: str, content: str | Any) -> None:
        """Add a file: a text unchanged, anything else as JSON. Credentials are masked in either."""
        if isinstance(content, str):
            text = content if self.names is None else self.names.replaced(content)
        else:
            content = content if self.names is None else self.names.replaced_in(content)
            text = json.dumps(content, indent=1, ensure_ascii=False)
        data = masked(text).encode("utf-8", "replace")
        if len(data) > MAX_PART_BYTES:
            data = data[-MAX_PART_BYTES:]
            says += f"; the last {MAX_PART_BYTES >> 20} MiB"
        self.files[name] = (says, data)

    def contents(self) -> list[str]:
        """A line for each file."""
        width = max(map(len, self.files), default=0)
        return [f"{name:<{width}}  {says}" for name, (says, _) in self.files.items()]

    def write(self, path: Path) -> None:
        """Write the archive, readable only by its owner. Raises CommandFailed: it exists, or cannot be written."""
        listed = "\n".join(
            [
                f"A bundle of Plainsong {__version__}, made at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}.",
                "It contains no payloads, attributes, tokens or keys."
                + (" Names of topics are replaced by hashes." if self.hides_names else ""),
                "",
                *self.contents(),
                "",
            ]
        )
        files = {CONTENTS: listed.encode(), **{name: data for name, (_, data) in self.files.items()}}
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise CommandFailed(f"{path} exists", hint="name a file that does not") from None
        except OSError as error:
            raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
                for name, data in files.items():
                    member = tarfile.TarInfo(f"plainsong-bundle/{name}")
                    member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
                    archive.addfile(member, io.BytesIO(data))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error


def gather(where: Where, checks: Any, *, config: str | None, log: str | None, hides_names: bool) -> Bundle:
    """Collect the contents of a bundle; if a part is unavailable, the reason takes its place.

    Args:
      checks: the findings of ``doctor``.
      config: the daemon's settings file.
      log: its log; None: the journal's, where there is one.
    """
    bundle = Bundle(hides_names)
    try:
        with asking(where, TIMEOUT_S) as (urls, ask):
            if hides_names:
                bundle.names = Names(_names(ask, urls))
            bundle.add("versions.json", "versions of what is installed here, and of the system", _versions())
            bundle.add("checks.json", "what doctor found: disk, clock, limits, daemon", checks)
            bundle.add("settings.json", "the settings, secrets as ***", _settings(config))
            for number, url in enumerate(urls):
                prefix = f"daemon-{number + 1}/" if len(urls) > 1 else ""
                for name, path, says, change in _PARTS:
                    bundle.add(prefix + name, says, _answered(ask, url, path, change))
    except PlainsongError as error:
        raise CommandFailed(error.detail, hint=error.hint or "") from error
    bundle.add("log.txt", f"the last {MAX_LOG_LINES} lines of the log", _log_lines(log))
    return bundle


def _transactions(shown: Any) -> Any:
    """Transactions without the names of their clients."""
    if not isinstance(shown, list):
        return shown
    return [{name: each[name] for name in _OF_TRANSACTIONS if name in each} for each in shown if isinstance(each, dict)]


def _same(shown: Any) -> Any:
    return shown


_PARTS: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    ("version.json", "/version", "the daemon's version", _same),
    ("readyz.json", "/readyz", "whether it is ready, and why not", _same),
    ("metrics.txt", "/metrics", "its metrics", _same),
    ("cluster.json", "/v1/cluster", "the instances, and what is drained and pinned", _same),
    ("attention.json", "/v1/attention", "what needs attention", _same),
    ("scrub.json", "/v1/scrub", "what the scrub has found", _same),
    (
        "transactions.json",
        "/v1/transactions?state=in_progress&longs=string&limit=1000",
        "open transactions, without the names of clients",
        _transactions,
    ),
)


def _answered(ask: Ask, url: str, path: str, change: Callable[[Any], Any]) -> Any:
    answer = ask(url, path)
    if isinstance(answer, Failure):
        return {"notKnown": answer.detail}
    try:
        shown = json.loads(answer.body)
    except ValueError:
        return answer.body.decode("utf-8", "replace")
    return change(shown) if answer.status == 200 else {"notKnown": shown, "status": answer.status}


def _names(ask: Ask, urls: Sequence[str]) -> set[str]:
    """The names of topics that the service shows, deleted ones among them."""
    found: set[str] = set()
    for url in urls:
        namespaces: Any = _answered(ask, url, "/v1/namespaces", _same)
        for namespace in namespaces if isinstance(namespaces, list) else ():
            for query in ("", "?deleted=true"):
                listed = _answered(ask, url, f"/v1/namespaces/{namespace}/topics{query}", _same)
                for each in listed if isinstance(listed, list) else ():
                    topic = each.get("name") if isinstance(each, dict) else each
                    if isinstance(topic, str) and len(found) < MAX_NAMES:
                        found.add(f"{namespace}:{topic}")
        for page in pages(partial(_topics_page, ask, url)):
            found.update(f"{each['namespace']}:{each['name']}" for each in page["topics"])
            if len(found) >= MAX_NAMES:
                break
    return found


def _topics_page(ask: Ask, url: str, after: str | None) -> dict[str, Any]:
    """A page of all topics; an empty last one if the daemon does not show them."""
    query = urlencode({"limit": 500} | ({"after": after} if after else {}))
    page = _answered(ask, url, f"/v1/topics?{query}", _same)
    return page if isinstance(page, dict) and page.get("topics") else {"topics": [], "next": None}


def _versions() -> dict[str, Any]:
    return {**installed_versions(), "system": platform.platform(), "machine": platform.machine()}


def _settings(config: str | None) -> Any:
    """The settings of a file and of this environment, as the server shows them if it is installed."""
    words = [sys.executable, "-m", "plainsong", "config", "show", "--origin", "--json"]
    try:
        ran = _run([*words, *(["--config", config] if config else [])])
        return masked_settings(json.loads(ran.stdout))
    except (OSError, subprocess.SubprocessError) as error:
        return {"notKnown": str(error)}
    except ValueError:
        return {"notKnown": ran.stderr.strip()[-2000:]}


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603 - fixed words


def _log_lines(log: str | None) -> str:
    try:
        if log is not None:
            with open(log, encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, MAX_LOG_LINES))
        if (journal := shutil.which("journalctl")) is None:
            return "unknown: no --log was given, and there is no journal\n"
        lines = str(MAX_LOG_LINES)
        ran = _run([journal, "--unit", "plainsong", "--lines", lines, "--no-pager", "--output", "cat"])
        return ran.stdout or f"unknown: {ran.stderr.strip()[:500]}\n"
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}\n"
