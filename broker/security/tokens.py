"""This daemon's tokens: creating and checking them, and the file of their hashes. Uses neither I/O nor a clock.

A token has 238 random bits, so a plain SHA-256 and a dictionary are enough; slow hashes are for passwords. Its prefix
lets scanners find leaked tokens, and its checksum distinguishes a mistyped token from an unknown one.
"""

from __future__ import annotations

import json
import re
from binascii import crc32
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PREFIX = "psg_"
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_RANDOM_CHARACTERS = 40
_CHECK_CHARACTERS = 6
_TOKEN = re.compile(rf"psg_[0-9A-Za-z]{{{_RANDOM_CHARACTERS + _CHECK_CHARACTERS}}}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|\+00:00)")
#: Valid names. Names of tokens have no colon, so that they cannot imitate other kinds of credentials.
NAME = re.compile(r"[A-Za-z0-9_.@:/+=-]{1,255}")
_TOKEN_NAME = re.compile(r"[A-Za-z0-9_.@/+=-]{1,255}")
_FIELDS = ("id", "name", "hash", "created", "expires", "revoked", "note")
FORMAT = 1
MAX_FILE_BYTES = 64 << 20
MAX_NOTE = 1_000

State = Literal["active", "expired", "revoked"]


class BadTokensFile(ValueError):
    """A tokens file that cannot be used; the text says where the fault is."""


def new_token(choose: Callable[[str], str]) -> str:
    """Return a new token; ``choose`` picks one of the given characters, using the system's random source."""
    body = PREFIX + "".join(choose(_DIGITS) for _ in range(_RANDOM_CHARACTERS))
    return body + checksum(body)


def checksum(body: str) -> str:
    """Return the checksum of a token that begins with ``body``: its CRC-32 in base 62."""
    left, digits = crc32(body.encode()), ""
    while left:
        left, digit = divmod(left, 62)
        digits = _DIGITS[digit] + digits
    return digits.rjust(_CHECK_CHARACTERS, "0")


def fault_of(token: str) -> str | None:
    """Return what is wrong with the form of a token; None if the form is valid."""
    if not token.startswith(PREFIX):
        return "it does not begin with psg_"
    if not _TOKEN.fullmatch(token):
        return "a token is psg_ and 46 letters and digits"
    if checksum(token[:-_CHECK_CHARACTERS]) != token[-_CHECK_CHARACTERS:]:
        return "its checksum is wrong: a character is wrong or missing"
    return None


def hash_of(token: str) -> str:
    """Return the hash of a token, as stored in the file."""
    return "sha256:" + sha256(token.encode()).hexdigest()


def id_of(hashed: str) -> str:
    """Return the id of the token with this hash."""
    return hashed.removeprefix("sha256:")[:12]


def is_name(name: str, *, of_token: bool = False) -> bool:
    """True if the name is valid; ``anonymous`` is reserved."""
    return name != "anonymous" and (_TOKEN_NAME if of_token else NAME).fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token in the file."""

    id: str
    name: str
    hash: str
    created_ms: int
    expires_ms: int | None
    """None if it never expires."""
    revoked_ms: int | None = None
    note: str = ""

    def state(self, now_ms: int) -> State:
        """Return the token's state. A token with a revocation time is revoked, even if that time is in the future."""
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "active"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """All tokens of a file."""

    entries: tuple[TokenEntry, ...]
    by_hash: Mapping[str, TokenEntry]
    by_id: Mapping[str, TokenEntry]

    @classmethod
    def of(cls, entries: Iterable[TokenEntry]) -> TokenTable:
        """Return the table of entries with distinct hashes."""
        kept = tuple(entries)
        return cls(kept, {entry.hash: entry for entry in kept}, {entry.id: entry for entry in kept})

    def find(self, token: str) -> TokenEntry | None:
        """Return the entry of a token, whatever its state."""
        return self.by_hash.get(hash_of(token))

    def valid_ids(self, now_ms: int) -> list[str]:
        """Return the ids of active tokens, sorted."""
        return sorted(entry.id for entry in self.entries if entry.state(now_ms) == "active")


NO_TOKENS = TokenTable.of(())


# --- the file --------------------------------------------------------------------------------------


def parse_tokens(data: bytes) -> TokenTable:
    """Parse a tokens file. Raises BadTokensFile: do not use any part of the file."""
    if len(data) > MAX_FILE_BYTES:
        raise BadTokensFile(f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        given = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadTokensFile(f"byte {error.start}: it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadTokensFile(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError):
        raise BadTokensFile("it is not JSON that can be read") from None
    if not isinstance(given, dict) or given.get("format") != FORMAT or isinstance(given.get("format"), bool):
        raise BadTokensFile(f'it is not an object with "format": {FORMAT}, the only one that this version reads')
    if set(given) != {"format", "tokens"} or not isinstance(given["tokens"], list):
        raise BadTokensFile('it has fields other than "format" and "tokens", or "tokens" is not a list')
    entries: dict[str, TokenEntry] = {}
    for number, fields in enumerate(given["tokens"], 1):
        entry = _entry(fields, f"token {number}")
        if entry.hash in entries:
            raise BadTokensFile(f"token {number}: its hash occurs twice")
        entries[entry.hash] = entry
    return TokenTable.of(entries.values())


def _entry(fields: Any, where: str) -> TokenEntry:
    if not isinstance(fields, dict) or not set(fields) <= set(_FIELDS):
        raise BadTokensFile(f"{where}: it is not an object of " + ", ".join(_FIELDS))
    name, hashed, note = fields.get("name"), fields.get("hash"), fields.get("note")
    if not isinstance(name, str) or not is_name(name, of_token=True):
        raise BadTokensFile(f"{where}: its name is not 1 to 255 of A-Z a-z 0-9 _ . @ / + = -, or reserved")
    if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
        raise BadTokensFile(f"{where}: its hash is not sha256: and 64 hexadecimal digits")
    if fields.get("id") != id_of(hashed):
        raise BadTokensFile(f"{where}: its id is not the first 12 digits of its hash")
    if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE):
        raise BadTokensFile(f"{where}: its note is not text of at most {MAX_NOTE} characters")
    created, expires, revoked = (_time_ms(fields.get(key), f"{where}: {key}") for key in _FIELDS[3:6])
    if created is None:
        raise BadTokensFile(f"{where}: it lacks the time of creation")
    return TokenEntry(id_of(hashed), name, hashed, created, expires, revoked, note or "")


def _time_ms(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and _TIME.fullmatch(value):
        try:
            return round(datetime.fromisoformat(value).timestamp() * 1000)
        except (ValueError, OverflowError):
            pass
    raise BadTokensFile(f"{where} is not a time such as 2027-01-31T12:00:00Z")


def format_tokens(entries: Iterable[TokenEntry]) -> bytes:
    """Return the content of a tokens file; the reverse of ``parse_tokens``."""
    shown = [
        {
            "id": entry.id,
            "name": entry.name,
            "hash": entry.hash,
            "created": time_text(entry.created_ms),
            "expires": time_text(entry.expires_ms),
            "revoked": time_text(entry.revoked_ms),
            "note": entry.note,
        }
        for entry in entries
    ]
    return json.dumps({"format": FORMAT, "tokens": shown}, ensure_ascii=False, indent=1).encode() + b"\n"


def time_text(time_ms: int | None) -> str | None:
    """Return a time in ISO 8601, UTC."""
    if time_ms is None:
        return None
    made = datetime.fromtimestamp(time_ms / 1000, UTC)
    return made.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")


# --- changes ---------------------------------------------------------------------------------------


def revoked(entries: Iterable[TokenEntry], chosen: Callable[[TokenEntry], bool], now_ms: int) -> list[TokenEntry]:
    """Return all entries; the chosen ones are revoked, now or earlier."""
    return [
        replace(entry, revoked_ms=now_ms) if entry.revoked_ms is None and chosen(entry) else entry for entry in entries
    ]


def pruned(entries: Iterable[TokenEntry], now_ms: int) -> list[TokenEntry]:
    """Return the active entries."""
    return [entry for entry in entries if entry.state(now_ms) == "active"]
