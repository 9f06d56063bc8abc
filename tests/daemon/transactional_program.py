"""A process with plainsong's own client that kills itself before its n-th request.

Arguments: url, name, the transaction's end (``commit`` or ``abort``), n. It prints the transaction that it began, what
it wrote, and that it is about to commit.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from itertools import count

from plainsong import Client
from plainsong._sync._pool import Pool

TOPICS = ("one", "two", "three")
#: Many times longer than its requests take.
TIMEOUT_S = 15


def main(url: str, name: str, end: str, last: str) -> None:
    numbers, carry = count(1), Pool.carry

    def mortal(self, send):
        if next(numbers) == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        if send.request.path.endswith("/commit"):
            print("asks", flush=True)
        return carry(self, send)

    Pool.carry = mortal
    client = Client(url, namespace="ring")
    with client, suppress(ZeroDivisionError), client.transaction(timeout_s=TIMEOUT_S, buffer_messages=4) as tx:
        print("began", tx.transaction.id, flush=True)
        for number in range(3):
            for topic in TOPICS:
                tx.publish(topic, b"%s.%d in %s" % (name.encode(), number, topic.encode()))
        if end == "abort":
            raise ZeroDivisionError
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
