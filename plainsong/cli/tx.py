"""``plainsong tx``: who is in a transaction, who holds a topic up, and what can be done about it."""

from __future__ import annotations

import click

from plainsong.cli.tx_end import abort, invalidate, truncate
from plainsong.cli.tx_look import blame, list_transactions, show
from plainsong.cli.tx_upkeep import pruning, recover
from plainsong.cli.verb import VerbGroup


@click.group(cls=VerbGroup)
def tx() -> None:
    """Transactions: who holds a topic up, and what to do about it.

    A transaction is known by its id, which is its first write pointer. In JSON
    ids are strings: they pass what programs that count in floats can hold.
    """


for _verb in (list_transactions, show, blame, abort, invalidate, truncate, pruning, recover):
    tx.add_command(_verb)
