"""Readers follow the state and the token of a workflow, even if it is killed at any step (use case 4).

Each step writes a row to the workflow's own database, a message to ``states``, and one to ``tokens`` with its changes
to the token that is passed on. One transaction commits all three. The daemon decides; the database is a participant
that follows the decision, even after a crash. So readers of committed messages never see a state that the workflow did
not reach, a state without its token, or either of them twice.

    workflow_states.py                              do one run, and print what a follower sees
    workflow_states.py run --run r1 --pause-s 2     kill it at any time, and run it again
    workflow_states.py watch --follow               print states as they change
"""

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from plainsong import JSON, Client, Transaction, TransactionContext
from plainsong.protocol.errors import TransactionNotFound, TransactionNotInProgress

STATES, TOKENS = "states", "tokens"
Token: TypeAlias = dict[str, Any]

#: The changes that each step makes to the token, in the order of the workflow.
STEPS: dict[str, Callable[[Token], Token]] = {
    "fetch": lambda token: {"source": "purchases", "rows": 1000},
    "clean": lambda token: {"rows": token["rows"] - 13, "dropped": 13},
    "count": lambda token: {"customers": token["rows"] // 3},
    "report": lambda token: {"report": f"{token['customers']} customers, {token['dropped']} rows dropped"},
}


class Runs:
    """The rows of all runs, one per step: written before the daemon decides, valid if it commits."""

    name = "runs"

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA synchronous = FULL")
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS steps"
            " (tx INTEGER PRIMARY KEY, run TEXT, step TEXT, token TEXT, committed BOOLEAN DEFAULT FALSE)"
        )
        self.tx = 0
        self.changes: list[tuple[str, str, Token]] = []

    def position(self, run: str) -> tuple[str | None, Token]:
        """Return the last step, and the token after it."""
        row = self.database.execute(
            "SELECT step, token FROM steps WHERE run = ? AND committed ORDER BY tx DESC", (run,)
        ).fetchone()
        return (row[0], json.loads(row[1])) if row else (None, {})

    def recover(self, client: Client) -> None:
        """Resolve undecided rows: query the outcome of their transactions, and end those that are still open."""
        for (tx,) in self.database.execute("SELECT tx FROM steps WHERE NOT committed").fetchall():
            with suppress(TransactionNotInProgress, TransactionNotFound):  # it was already decided
                client.transactions.abort(tx)
            outcome = client.transactions.get(tx).state
            print(f"transaction {tx} was interrupted: {outcome}", flush=True)
            if outcome == "committed":
                self.database.execute("UPDATE steps SET committed = TRUE WHERE tx = ?", (tx,))
            elif outcome in ("aborted", "invalid"):
                self.database.execute("DELETE FROM steps WHERE tx = ?", (tx,))
            else:
                raise SystemExit(f"the daemon no longer knows transaction {tx}; look into {TOKENS} and decide")

    # --- as a participant of a transaction: TransactionAware -----------------------------------------

    def start_tx(self, transaction: Transaction) -> None:
        """Nothing to do: there are no changes yet."""
        self.tx, self.changes = transaction.id, []

    def update_tx(self, transaction: Transaction) -> None:
        """Nothing to do: the id does not change."""

    def tx_changes(self) -> list[bytes]:
        """Return the key of the run: of two transactions that advance it concurrently, only one can commit."""
        return [run.encode() for run, _, _ in self.changes]

    def commit_tx(self) -> bool:
        """Write the row durably; it is not valid yet."""
        rows = [(self.tx, run, step, json.dumps(token)) for run, step, token in self.changes]
        self.database.executemany("REPLACE INTO steps (tx, run, step, token) VALUES (?, ?, ?, ?)", rows)
        return True

    def post_tx_commit(self) -> None:
        """Mark the row valid: the daemon has committed."""
        self.database.execute("UPDATE steps SET committed = TRUE WHERE tx = ?", (self.tx,))

    def rollback_tx(self) -> bool:
        """Delete the row."""
        self.database.execute("DELETE FROM steps WHERE tx = ?", (self.tx,))
        return True


def run_workflow(client: Client, runs: Runs, run: str, pause_s: float) -> None:
    """Do the remaining steps of a run."""
    runs.recover(client)

    def take_next_step(tx: TransactionContext) -> str | None:
        last, token = runs.position(run)
        left = list(STEPS)[0 if last is None else list(STEPS).index(last) + 1 :]
        if not left:
            return None
        step = left[0]
        time.sleep(pause_s)  # where real work would be done
        changed = STEPS[step](token)
        runs.changes = [(run, step, {**token, **changed})]
        state = "running" if left[1:] else "completed"
        tx.publish(STATES, {"run": run, "step": step, "state": state}, serializer=JSON)
        tx.publish(TOKENS, {"run": run, "step": step, "changed": changed}, serializer=JSON)
        return step

    while step := client.run_in_transaction(take_next_step, participants=[runs]):
        print(f"{run}: {step} is done", flush=True)


def watch(client: Client, *, follow: bool) -> None:
    """Print committed states and token changes."""
    for message in client.read([STATES, TOKENS], follow=follow, serializer=JSON):
        print(f"  {message.topic:<6} {json.dumps(message.value)}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="workflow", help="namespace of the topics (default: %(default)s)")
    parser.add_argument("--database", type=Path, default=Path(tempfile.gettempdir()) / "plainsong-workflow.db")
    parser.add_argument("--run", default=time.strftime("run-%Y%m%d-%H%M%S"), help="name of the run (default: the time)")
    parser.add_argument("--pause-s", type=float, default=0.0, help="how long each step takes")
    parser.add_argument("--follow", action="store_true", help="watch: wait for new messages")
    parser.add_argument("what", nargs="?", choices=["demo", "run", "watch"], default="demo")
    args = parser.parse_args()
    with Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        for topic in (STATES, TOKENS):
            client.create_topic(topic, if_not_exists=True)
        if args.what != "watch":
            run_workflow(client, Runs(args.database), args.run, args.pause_s)
        if args.what != "run":
            watch(client, follow=args.follow)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
