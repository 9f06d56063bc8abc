"""The verb `token`: makes, lists, revokes, rotates and checks the tokens in the daemon's tokens file; needs no daemon."""

from __future__ import annotations

import re
import secrets
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from broker.command.security_files import chosen_file, file_options, named_file
from broker.security.files import locked, read_guarded, reason_of, write_guarded, write_secret
from broker.security.tokens import (
    MAX_FILE_BYTES,
    MAX_NOTE,
    NO_TOKENS,
    BadTokensFile,
    TokenEntry,
    fault_of,
    format_tokens,
    hash_of,
    id_of,
    is_name,
    new_token,
    parse_tokens,
    pruned,
    revoked,
    time_text,
)
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup, json_option
from plainsong.cli.options import parse_length_s
from plainsong.cli.output import confirmed, echo_json
from storage.clock import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from broker.security.tokens import TokenTable

F = TypeVar("F", bound="Callable[..., Any]")
MAX_LIFE_S = 397 * 86_400
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}(T.*)?")


class Expiry(click.ParamType["int | None"]):
    """The end of a token's life: ``90d``, ``2027-01-31`` or ``never``; in milliseconds since 1970, or 0 for never."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if text == "never":
            return 0
        at_ms = self._time_ms(text)
        if at_ms is None:
            self.fail(f"{text[:40]!r} is not an expiry; use for example 90d, 2027-01-31 or never", param, ctx)
        if at_ms <= now_ms():
            self.fail(f"{text} is in the past", param, ctx)
        if at_ms > now_ms() + MAX_LIFE_S * 1000:
            self.fail(f"{text} is more than 397 days away; use never if that is intended", param, ctx)
        return at_ms

    @staticmethod
    def _time_ms(text: str) -> int | None:
        if _DAY.fullmatch(text):
            try:
                moment = datetime.fromisoformat(text)
            except ValueError:
                return None
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
            return round(moment.timestamp() * 1000)
        seconds = parse_length_s(text)
        return None if seconds is None or seconds > 100 * MAX_LIFE_S else now_ms() + round(seconds * 1000)


class Overlap(click.ParamType[int]):
    """A length of time in milliseconds, which may be 0."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        seconds = parse_length_s(str(value))
        if seconds is None or seconds > MAX_LIFE_S:
            self.fail(f"{str(value)[:40]!r} is not a duration; use for example 30s, 12h or 7d", param, ctx)
        return round(seconds * 1000)


@click.group(cls=VerbGroup)
def token() -> None:
    """Create, list and revoke clients' tokens.

    Works on the tokens file (security.tokens_file), which a running daemon
    reads again within two seconds. The file holds hashes: a token is shown
    once, when it is created.
    """


def new_token_options(command: F) -> F:
    """Add the options of every verb that makes a token: where to write it, which file to change, ``--json``."""
    write_to = click.option(
        "--write-to", type=click.Path(path_type=Path), help="Write it to this new file, readable only by its owner."
    )
    return write_to(file_options("tokens")(json_option(command)))


@token.command(
    examples=[
        "plainsong token create --file tokens.json --name billing --expires 90d",
        "plainsong token create --config plainsong.toml --name billing \\",
        "    --expires 2027-01-31 --write-to billing.token",
    ]
)
@click.option("--name", required=True, help="Name of the client; several tokens may share it.")
@click.option(
    "--expires", "expires_ms", type=Expiry(), required=True, help="90d, 2027-01-31 or never; at most 397 days."
)
@click.option("--note", default="", help="Purpose; `list` shows it.")
@new_token_options
def create(
    name: str,
    expires_ms: int,
    note: str,
    write_to: Path | None,
    file: Path | None,
    config: Path | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create a token and show it once."""
    path = chosen_file("tokens", file, config, sets)
    _refuse_name(name)
    if len(note) > MAX_NOTE or not note.isprintable():
        raise CommandFailed(f"a note has at most {MAX_NOTE} characters, on one line", code=Exit.USAGE)
    made = new_token(secrets.choice)
    entry = _entry_of(made, name, expires_ms or None, note)
    _changed(path, lambda entries: [*entries, entry], write_to, made)
    _show_made(made, entry, write_to, as_json=as_json)


@token.command(name="list", examples=["plainsong token list --file tokens.json"])
@file_options("tokens")
@json_option
def list_tokens(file: Path | None, config: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """List tokens: id, name, times and state."""
    table = _read(chosen_file("tokens", file, config, sets))
    now = now_ms()
    if as_json:
        echo_json([_shown(entry, now) for entry in table.entries])
        return
    rows = [
        (
            entry.id,
            entry.name,
            time_text(entry.created_ms) or "",
            time_text(entry.expires_ms) or "never",
            entry.state(now),
            entry.note,
        )
        for entry in table.entries
    ]
    # Never truncated: a truncated id cannot be revoked.
    output.echo_lines(output.table(("ID", "NAME", "CREATED", "EXPIRES", "STATE", "NOTE"), rows, columns=sys.maxsize))


@token.command(
    examples=[
        "plainsong token revoke --file tokens.json c4b85a8b6a3c",
        "plainsong token revoke --file tokens.json --name billing --yes",
    ]
)
@click.argument("token_id", metavar="[ID]", required=False)
@click.option("--name", help="Revoke all tokens of this name.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@file_options("tokens")
@json_option
def revoke(
    token_id: str | None,
    name: str | None,
    yes: bool,
    file: Path | None,
    config: Path | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Revoke a token, or all tokens of a name.

    A running daemon refuses them within two seconds, even on open connections.
    """
    if (token_id is None) == (name is None):
        raise CommandFailed("which token?", hint="give an ID from `plainsong token list`, or --name", code=Exit.USAGE)
    path = chosen_file("tokens", file, config, sets)

    def chosen(entry: TokenEntry) -> bool:
        return entry.id == token_id if name is None else entry.name == name

    found = [entry for entry in _read(path).entries if chosen(entry)]
    if not found:
        raise _no_token(token_id or str(name))
    active = [entry for entry in found if entry.revoked_ms is None]
    if active:
        confirmed(f"Revoke {output.counted(len(active), 'token')} of {active[0].name}?", yes=yes)
        now = now_ms()
        _changed(path, lambda entries: revoked(entries, chosen, now))
    if as_json:
        echo_json({"revoked": [entry.id for entry in active]})
    else:
        click.echo(f"{output.counted(len(active), 'token')} revoked")


@token.command(examples=["plainsong token rotate --file tokens.json c4b85a8b6a3c --overlap 24h"])
@click.argument("token_id", metavar="ID")
@click.option(
    "--overlap",
    "overlap_ms",
    type=Overlap(),
    default="24h",
    show_default=True,
    help="How long the old token stays valid.",
)
@click.option(
    "--expires", "expires_ms", type=Expiry(), help="Expiry of the new token; default: the same period as the old one's."
)
@new_token_options
def rotate(
    token_id: str,
    overlap_ms: int,
    expires_ms: int | None,
    write_to: Path | None,
    file: Path | None,
    config: Path | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create a new token of the same name; the old one expires after the overlap."""
    path = chosen_file("tokens", file, config, sets)
    now = now_ms()
    old = next((entry for entry in _read(path).entries if entry.id == token_id), None)
    if old is None:
        raise _no_token(token_id)
    if old.state(now) != "active":
        raise CommandFailed(f"{token_id} is {old.state(now)}", hint="create one with `plainsong token create`")
    if expires_ms is None:
        expires_ms = 0 if old.expires_ms is None else now + min(old.expires_ms - old.created_ms, MAX_LIFE_S * 1000)
    made = new_token(secrets.choice)
    entry = _entry_of(made, old.name, expires_ms or None, old.note)
    last = now + overlap_ms

    def rotated(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        ended = [
            replace(each, expires_ms=min(each.expires_ms or last, last)) if each.id == token_id else each
            for each in entries
        ]
        return [*ended, entry]

    _changed(path, rotated, write_to, made)
    _show_made(made, entry, write_to, as_json=as_json)


@token.command(examples=["plainsong token prune --file tokens.json"])
@file_options("tokens")
@json_option
def prune(file: Path | None, config: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Remove expired and revoked tokens from the file."""
    path = chosen_file("tokens", file, config, sets)
    before = len(_read(path).entries)
    left: list[TokenEntry] = []

    def kept(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        left[:] = pruned(entries, now_ms())
        return left

    _changed(path, kept)
    if as_json:
        echo_json({"removed": before - len(left), "left": len(left)})
    else:
        click.echo(f"{output.counted(before - len(left), 'token')} removed, {len(left)} left")


@token.command(
    examples=["plainsong token check --file tokens.json billing.token", "cat billing.token | plainsong token check"]
)
@click.argument("source", metavar="[FILE|-]", default="-")
@file_options("tokens")
@json_option
def check(source: str, file: Path | None, config: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Check a token: its form, checksum, state and name.

    Exits with 0 if a daemon with this file would accept it, else with 1.
    Without a tokens file only the form is checked.
    """
    given = _given_token(source)
    fault = fault_of(given)
    found: dict[str, object] = {"valid": fault is None, "fault": fault, "id": None, "name": None, "state": None}
    is_accepted = fault is None
    if fault is None:
        found["id"] = id_of(hash_of(given))
        if (path := named_file("tokens", file, config, sets)) is not None:
            entry = _read(path).find(given)
            found["state"] = "unknown" if entry is None else entry.state(now_ms())
            found["name"] = None if entry is None else entry.name
            is_accepted = found["state"] == "active"
    if as_json:
        echo_json(found)
    elif fault is not None:
        click.echo(f"this is not a token: {fault}")
    else:
        state, name = found["state"], found["name"]
        click.echo(f"{found['id']}  well-formed" + (f"  {state}" if state else "") + (f"  {name}" if name else ""))
    if not is_accepted:
        click.get_current_context().exit(Exit.FAILED)


# --- the file --------------------------------------------------------------------------------------


def _read(path: Path) -> TokenTable:
    try:
        data, _ = read_guarded(path, MAX_FILE_BYTES, secret=True)
        return parse_tokens(data)
    except FileNotFoundError:
        raise CommandFailed(
            f"{path} does not exist", hint="plainsong token create creates it", code=Exit.USAGE
        ) from None
    except (OSError, BadTokensFile) as error:
        raise _unusable(path, error) from None


def _changed(
    path: Path,
    change: Callable[[Sequence[TokenEntry]], Sequence[TokenEntry]],
    write_to: Path | None = None,
    made: str = "",
) -> None:
    """Change the file under its lock. ``made`` is written to ``write_to`` first, so that no valid token is lost."""
    try:
        with locked(path):
            table = _read(path) if path.exists() else NO_TOKENS
            if write_to is not None:
                write_secret(write_to, made)
            write_guarded(path, format_tokens(change(table.entries)))
    except FileExistsError:
        raise CommandFailed(
            f"{write_to} already exists", hint="this file is never overwritten: name another one", code=Exit.USAGE
        ) from None
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> CommandFailed:
    return CommandFailed(f"{reason_of(error, path)}; nothing was changed", code=Exit.USAGE)


def _no_token(what: str) -> CommandFailed:
    return CommandFailed(
        f"there is no token {what[:80]!r}", hint="`plainsong token list` shows them", code=Exit.NOT_FOUND
    )


def _refuse_name(name: str) -> None:
    if not is_name(name, of_token=True):
        raise CommandFailed(
            f"{name[:80]!r} is not a name for a token",
            hint="use 1 to 255 of A-Z a-z 0-9 _ . @ / + = -; anonymous is reserved",
            code=Exit.USAGE,
        )


def _entry_of(made: str, name: str, expires_ms: int | None, note: str) -> TokenEntry:
    hashed = hash_of(made)
    return TokenEntry(id_of(hashed), name, hashed, now_ms() // 1000 * 1000, expires_ms, None, note)


def _shown(entry: TokenEntry, now: int) -> dict[str, object]:
    return {
        "id": entry.id,
        "name": entry.name,
        "created": time_text(entry.created_ms),
        "expires": time_text(entry.expires_ms),
        "state": entry.state(now),
        "note": entry.note,
    }


def _show_made(made: str, entry: TokenEntry, write_to: Path | None, *, as_json: bool) -> None:
    if as_json:
        shown = _shown(entry, now_ms())
        echo_json(shown | ({"token": made} if write_to is None else {"writtenTo": str(write_to)}))
    elif write_to is None:
        click.echo(made)
        output.note(f"token {entry.id} of {entry.name}; it is not shown again")
    else:
        click.echo(f"token {entry.id} of {entry.name} is in {write_to}")


def _given_token(source: str) -> str:
    try:
        text = sys.stdin.read(1 << 16) if source == "-" else Path(source).read_text("utf-8", "replace")[: 1 << 16]
    except OSError as error:
        raise CommandFailed(f"{source}: {error.strerror}", code=Exit.USAGE) from None
    return text.strip()
