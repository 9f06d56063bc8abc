"""A program that writes rows and leaves messages in the outbox, in several threads, until it is killed.

    outbox_writer.py DATABASE_URL FIRST

Each transaction writes a row of ``orders``, and one or two messages with its id: ``17 0``. No other program uses FIRST
and the ids after it. After each commit it prints the transaction's id, and the times (nanoseconds of the machine's
monotonic clock) before the commit was called and after it returned.
"""

from __future__ import annotations

import random
import sys
import threading
import time

from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from plainsong.sql import Outbox

THREADS = 3
#: Pause between a thread's transactions: enough of them still overlap, and the check has fewer to read.
PAUSE_S = 0.01


def work(database: str, first: int, thread: int) -> None:
    chance = random.Random(first + thread)
    is_sqlite = database.startswith("sqlite")
    options = {"timeout": 30} if is_sqlite else {"connect_timeout": 2}
    engine = create_engine(database, connect_args=options, pool_pre_ping=True)
    number = first + thread
    while True:
        time.sleep(PAUSE_S)
        number += THREADS
        try:
            with Session(engine) as session:
                outbox = Outbox(session)
                outbox.publish("orders", b"%d 0" % number)
                session.execute(text("INSERT INTO orders (id, state) VALUES (:id, 'new')"), {"id": number})
                if chance.random() < 0.5:
                    outbox.publish("orders", b"%d 1" % number)
                if chance.random() < 0.2:
                    session.rollback()
                    continue
                called = time.monotonic_ns()
                session.commit()
                sys.stdout.write(f"{number} {called} {time.monotonic_ns()}\n")
                sys.stdout.flush()
        except SQLAlchemyError:
            continue  # the database was killed or is starting


def main(database: str, first: str) -> None:
    threads = [threading.Thread(target=work, args=(database, int(first), each), daemon=True) for each in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
