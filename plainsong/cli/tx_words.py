"""Transactions as the command line writes them: ids, states, and one transaction as a row, as facts and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import tables
from plainsong.cli.say import harmless
from plainsong.cli.times import now_ms, show_length, show_time

if TYPE_CHECKING:
    from plainsong import TransactionStatus

#: States as the service names them; people may write a blank or a hyphen.
STATES = ("in_progress", "invalid", "committed", "aborted")
HEADINGS = ("CLIENT", "ID", "STATE", "TYPE", ">AGE", ">LEFT", ">TOPICS", ">HIDDEN")
MAX_ID = (1 << 63) - 1


class TransactionId(click.ParamType[int]):
    """A transaction's id on the command line."""

    name = "id"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; fails for what can be none."""
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID)) and 0 < int(text) <= MAX_ID):
            self.fail(f"{text[:40]!r} is no transaction id; `plainsong tx ls` shows those there are", param, ctx)
        return int(text)


def as_json(status: TransactionStatus) -> dict[str, Any]:
    """For programs; the names are the HTTP interface's."""
    return {
        "id": str(status.id),
        "writePointer": str(status.write_pointer),
        "type": status.type,
        "clientId": status.client_id,
        "state": status.state,
        "startedMs": status.started_ms,
        "expiresMs": status.expires_ms,
        "decidedMs": status.decided_ms,
        "topics": list(status.topics),
        "hiddenMessages": status.hidden_messages,
        "keptUntilMs": status.kept_until_ms,
    }


def row_of(status: TransactionStatus, now: int) -> tuple[str, ...]:
    """One transaction below ``HEADINGS``."""
    return (
        harmless(status.client_id or "-"),
        str(status.id),
        shown_state(status.state),
        status.type or "-",
        show_length(max(0, now - status.issued_ms)),
        show_length(left_ms(status, now)),
        str(len(status.topics)),
        tables.show_count(status.hidden_messages),
    )


def facts_of(status: TransactionStatus) -> list[tuple[str, str]]:
    """Everything that is known of one."""
    now = now_ms()
    pairs = [("transaction", str(status.id)), ("state", shown_state(status.state))]
    if status.state == "unknown":
        return [*pairs, ("", "never begun by this daemon, or so long ago that its outcome is not kept any more")]
    if status.write_pointer != status.id:
        pairs.append(("write pointer", f"{status.write_pointer}, since its last checkpoint"))
    begun = f"{show_time(status.issued_ms)}, {show_length(max(0, now - status.issued_ms))} ago"
    pairs += [("type", status.type or "-"), ("client", harmless(status.client_id or "-")), ("begun", begun)]
    left = left_ms(status, now)
    if left is not None:
        pairs.append(("times out", f"in {show_length(left)}, then it is invalid"))
    if status.kept_until_ms is not None:
        pairs.append(("remembered", f"for {show_length(max(0, status.kept_until_ms - now))} at least"))
    pairs.append(("topics", ", ".join(status.topics) or "none with messages that wait for it"))
    if status.hidden_messages:
        pairs.append(("hides", f"{tables.show_count(status.hidden_messages)} messages from committed readers"))
    return pairs


def left_ms(status: TransactionStatus, now: int) -> int | None:
    """Until its time-out; None for one that is not in progress."""
    if status.state != "in_progress" or status.expires_ms is None:
        return None
    return max(0, status.expires_ms - now)


def shown_state(state: str) -> str:
    """For people."""
    return state.replace("_", " ")
