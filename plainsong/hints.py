"""The daemon's hints, reworded for Python programs and for the command line.

The daemon phrases its hints in terms of HTTP. Programs get hints about the client's methods instead, and users of the
command line get hints about its verbs and options.
"""

from __future__ import annotations

from typing import NamedTuple


class Hint(NamedTuple):
    """One hint in three wordings."""

    http: str
    python: str
    command: str


HINTS = (
    Hint(
        "create it with PUT, or check the name",
        "create it with create_topic, or check the name",
        "plainsong topic create creates it, plainsong topic list shows the topics",
    ),
    Hint("add ?ifNotExists=true to accept it", "if_not_exists=True accepts it", "--if-not-exists accepts it"),
    Hint(
        "send the header Authorization: Bearer with a token; plainsong token create makes one",
        "give the client token= or token_file=; plainsong token create makes a token",
        "give --token-file FILE, or a context that has one; plainsong token create makes a token",
    ),
    Hint(
        "send it in the header Authorization",
        "give the client token= or token_file=",
        "give --token-file FILE",
    ),
    Hint("PUT its position first", "set its position first, with set_reader", "plainsong reader set sets its position"),
    Hint(
        "PUT its position, or send Plainsong-Reader with its polls",
        "set its position with set_reader",
        "plainsong reader set sets its position",
    ),
    Hint("GET …/messages lists them", "messages() lists them", "plainsong peek shows them"),
    Hint("retry later, or poll with waitMs", "retry later, or poll with wait_ms", "retry later, or poll with --wait"),
    Hint(
        "wait for it, or end it: DELETE /v1/backups/ID; an idle one ends by itself",
        "wait for it; an idle one ends by itself",
        "wait for it; an idle one ends by itself",
    ),
    Hint(
        "start one, and wait until GET /v1/replication of this daemon shows it in standbys",
        "start one, and wait until plainsong replica status shows it",
        "start one, and wait until plainsong replica status shows it",
    ),
    Hint(
        "send the ETag from GET unchanged, in its quotes",
        "pass the etag that was returned, unchanged",
        "give the etag that was shown, unchanged",
    ),
    Hint(
        "store needs transactionWritePointer, or producer and segment",
        "store needs a transaction, or a producer and a segment",
        "give --tx",
    ),
    Hint(
        "asOfMs reads what was committed by then",
        "as_of reads what was committed by then",
        "--as-of reads what was committed by then",
    ),
    Hint(
        "give it as the request's routingKey",
        "give it as routing_key of the whole batch",
        "give --routing-key",
    ),
    Hint(
        "POST /v1/transactions begins a transaction and returns its write pointer",
        "client.transaction() begins one",
        "a program begins a transaction; plainsong tx ls lists those in progress",
    ),
)
_BY_HTTP = {each.http: each for each in HINTS}
_BY_ANY = {text: each for each in HINTS for text in (each.http, each.python)}


def in_python(hint: str) -> str:
    """The daemon's hint for a program."""
    known = _BY_HTTP.get(hint)
    return hint if known is None else known.python


def in_command(hint: str) -> str:
    """The daemon's or the client's hint for a person at a terminal."""
    known = _BY_ANY.get(hint)
    return hint if known is None else known.command
