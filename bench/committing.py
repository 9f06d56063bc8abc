"""Latency of a committed reader: writers with short transactions, one long transaction, and a reader waiting for them.

    python -m bench.committing --port 7420 --topic t --seconds 20 --rate 3000 --writers 16 --stored 1000000

Runs as its own process, with a thread per connection. Each message carries the time at which its publish was sent.
Prints one JSON object: ``p50_ms``, ``p99_ms`` and ``max_ms`` from that time to the message's delivery, ``messages``,
``rate`` (messages a second), ``hold_ms`` (from sending the long transaction's publish to the response to its commit; 0
without a long transaction) and ``gap_ms`` (the longest time in which no message of the writers arrived).
"""

from __future__ import annotations

import argparse
import json
import struct
import threading
import time
from dataclasses import dataclass, field

from bench import bodies
from bench.load import post
from bench.stored import LAST_ID, PER_REQUEST, under
from bench.wire import Wire, begin, decide
from plainsong.protocol.codec import AVRO, AVRO_2
from plainsong.protocol.frames import decode_frames
from plainsong.protocol.ids import after
from plainsong.protocol.requests import PollRequest, PublishRequest

_STAMP = struct.Struct(">Q")
_MAGIC = b"stamped:"
#: The long transaction is published in the middle of the run, and stays undecided for this long.
HOLD_S = 0.05
#: The reader gives up this long after the writers have ended.
PATIENCE_S = 30.0


@dataclass(slots=True)
class Run:
    """State shared by the threads."""

    port: int
    topic: str
    seconds: float
    ends_s: float
    sent: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    gap_ms: float = 0.0
    hold_ms: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)


def write(run: Run, per_second: float, per_transaction: int) -> None:
    """Run short transactions at a steady rate until the end of the run; at least one."""
    pause_s = per_transaction / per_second
    due_s = time.monotonic()
    with Wire(run.port) as wire:
        while not run.sent or time.monotonic() < run.ends_s:
            pointer = begin(wire)
            stamp = _MAGIC + _STAMP.pack(time.monotonic_ns()) + b"x" * 84
            body = AVRO.encode_publish(PublishRequest([stamp] * per_transaction, write_pointer=pointer))
            wire.send(post(bodies.path(run.topic, "publish"), body, [bodies.AVRO_TYPE]))
            decide(wire, pointer, "commit")
            with run.lock:
                run.sent += per_transaction
            due_s += pause_s
            time.sleep(max(0.0, due_s - time.monotonic()))


def write_stored(run: Run, messages: int) -> None:
    """Run one long transaction: store during the first half of the run, publish, wait, commit."""
    with Wire(run.port) as wire:
        pointer = begin(wire, "long")
        request = under(run.topic, "store", pointer, PER_REQUEST)
        requests = messages // PER_REQUEST
        pause_s = run.seconds / 2 / requests
        due_s = time.monotonic()
        for _ in range(requests):
            wire.send(request)
            due_s += pause_s
            time.sleep(max(0.0, due_s - time.monotonic()))
        begun_s = time.monotonic()
        wire.send(under(run.topic, "publish", pointer, 0))
        time.sleep(HOLD_S)
        decide(wire, pointer, "commit")
        run.hold_ms = (time.monotonic() - begun_s) * 1e3


def read(run: Run) -> None:
    """Run committed long polls until everything that the writers sent has arrived."""
    since: bytes | None = None
    last_s = time.monotonic()
    with Wire(run.port) as wire:
        while not (run.stop.is_set() and len(run.latencies_ms) >= run.sent):
            if time.monotonic() > run.ends_s + PATIENCE_S:
                raise RuntimeError(f"only {len(run.latencies_ms)} of {run.sent} messages arrived")
            asked = PollRequest(since, limit=10_000, isolation="committed", wait_ms=1000)
            headers = [f"Content-Type: {AVRO_2.content_type}", bodies.FRAMES]
            head, body = wire.send(post(bodies.path(run.topic, "poll"), AVRO_2.encode_poll(asked), headers))
            now_ns = time.monotonic_ns()
            stamped = False
            last = LAST_ID.search(head)
            since = since if last is None else after(bytes.fromhex(last.group(1).decode()))
            # Do not decode pages of the long transaction's messages alone: the reader must not become the bottleneck.
            for frame in decode_frames(body) if _MAGIC in body else ():
                if frame.payload.startswith(_MAGIC):
                    stamped = True
                    run.latencies_ms.append((now_ns - _STAMP.unpack_from(frame.payload, len(_MAGIC))[0]) / 1e6)
            if stamped:
                run.gap_ms = max(run.gap_ms, (now_ns / 1e9 - last_s) * 1e3)
                last_s = now_ns / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="Latencies of a committed reader; prints one JSON object.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", default="t")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=3000.0, help="messages a second, of all writers together")
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--per-transaction", type=int, default=10)
    parser.add_argument("--stored", type=int, default=0, help="messages of the long transaction; 0: none")
    args = parser.parse_args()
    run = Run(args.port, args.topic, args.seconds, time.monotonic() + args.seconds)
    reader = threading.Thread(target=read, args=(run,))
    others = [
        threading.Thread(target=write, args=(run, args.rate / args.writers, args.per_transaction))
        for _ in range(args.writers)
    ]
    if args.stored:
        others.append(threading.Thread(target=write_stored, args=(run, args.stored)))
    for thread in (reader, *others):
        thread.start()
    for thread in others:
        thread.join()
    run.stop.set()
    reader.join()
    found = sorted(run.latencies_ms)
    print(
        json.dumps(
            {
                "messages": len(found),
                "rate": round(len(found) / args.seconds, 1),
                "p50_ms": found[len(found) // 2],
                "p99_ms": found[int(len(found) * 0.99)],
                "max_ms": found[-1],
                "hold_ms": run.hold_ms,
                "gap_ms": run.gap_ms,
            }
        )
    )


if __name__ == "__main__":
    main()
