"""The workflow of workflow_states.py with its rows in PostgreSQL, through a ready-made participant (use case 4).

``SqlParticipant`` adds a SQLAlchemy session to the transaction: its rows are prepared before the daemon decides, and
committed if it decides to commit. At startup, ``recover`` commits or rolls back the prepared rows of a killed
program, as the daemon decided.

It needs plainsong-client[sql], and a server whose max_prepared_transactions is not 0 (see docs/sql.md):

    workflow_states_sql.py --database postgresql+psycopg://shop@127.0.0.1:5432/shop
    workflow_states_sql.py --database … --run r1 --pause-s 2     kill it at any time, and run it again
"""

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from sqlalchemy import Engine, create_engine
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from plainsong import JSON, Client, TransactionContext
from plainsong.sql import SqlParticipant, recover

STATES, TOKENS = "states", "tokens"
Token: TypeAlias = dict[str, Any]

#: The changes that each step makes to the token, in the order of the workflow.
STEPS: dict[str, Callable[[Token], Token]] = {
    "fetch": lambda token: {"rows": 1000},
    "clean": lambda token: {"rows": token["rows"] - 13, "dropped": 13},
    "count": lambda token: {"customers": token["rows"] // 3},
}


class Base(DeclarativeBase):
    """The tables."""


class Run(Base):
    """One run of the workflow: the last completed step, and the token after it."""

    __tablename__ = "workflow_runs"

    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[str]
    token: Mapped[dict[str, Any]] = mapped_column(JSONB)


def run_workflow(client: Client, engine: Engine, name: str, pause_s: float) -> None:
    """Take the remaining steps of a run."""
    for left in recover(engine, client).found:
        if left.state == "in_progress":  # from this program's previous run: no other process runs this workflow
            client.transactions.abort(left.transaction_id)
    recover(engine, client)

    def take_next_step(tx: TransactionContext) -> str | None:
        run = session.get(Run, name, with_for_update=True) or Run(name=name, step="", token={})
        steps = list(STEPS)[list(STEPS).index(run.step) + 1 if run.step else 0 :]
        if not steps:
            return None
        time.sleep(pause_s)  # the real work would be done here
        changed = STEPS[steps[0]](run.token)
        run.step, run.token = steps[0], {**run.token, **changed}
        session.add(run)
        state = "running" if steps[1:] else "completed"
        tx.publish(STATES, {"run": name, "step": run.step, "state": state}, serializer=JSON)
        tx.publish(TOKENS, {"run": name, "step": run.step, "changed": changed}, serializer=JSON)
        return run.step

    with Session(engine) as session:
        while step := client.run_in_transaction(take_next_step, participants=[SqlParticipant(session)]):
            print(f"{name}: {step} is done", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="workflow", help="namespace of the topics (default: %(default)s)")
    parser.add_argument("--database", required=True, help="URL for SQLAlchemy")
    parser.add_argument("--run", default=time.strftime("run-%Y%m%d-%H%M%S"), help="name of the run (default: the time)")
    parser.add_argument("--pause-s", type=float, default=0.0, help="how long each step takes")
    args = parser.parse_args()
    engine = create_engine(args.database)
    Base.metadata.create_all(engine)
    with Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        for topic in (STATES, TOKENS):
            client.create_topic(topic, if_not_exists=True)
        run_workflow(client, engine, args.run, args.pause_s)
    engine.dispose()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
