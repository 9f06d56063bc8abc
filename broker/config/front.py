"""The settings of the daemon's face: HTTP, logs, and leaving."""

from __future__ import annotations

from dataclasses import dataclass

from broker.config.meaning import GIB, KIB, MIB, address, choice, count, seconds, size, switch


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The doors: where they are, and the bounds on what comes through them."""

    bind: str = address("127.0.0.1:7420", "The address and port to listen on; port 0 takes a free one and says which.")
    lane: bool = switch(
        True, "Serve publish, store, rollback and poll by the fast lane; false sends every request through the server."
    )
    processes: int = count(
        1,
        "Front ends: with more than one, so many processes accept connections and read requests, and one owns the topics.",
        small="reading requests and writing answers keeps one core busy while others rest",
        large="memory is taken, and cores that share their work do not get faster by more of them",
        high=64,
    )
    max_body_bytes: int = size(
        64 * MIB,
        "The largest body of a request, also after decompression; beyond it the answer is 413.",
        small="large batches are refused",
        large="few clients can fill http.max_inflight_bytes",
        low=KIB,
        high=1 * GIB,
    )
    max_connections: int = count(
        10_000,
        "Connections held at once; a further one is answered 503 overloaded and closed.",
        small="clients are sent away while the daemon is idle",
        large="the limit on open files is reached first, or memory runs out",
        high=1_000_000,
    )
    max_inflight_bytes: int = size(
        256 * MIB,
        "Bodies held in memory at once, over all connections, compressed and not; beyond it the answer is 503 overloaded.",
        small="parallel large publishes are sent away",
        large="the daemon's memory grows by as much under load",
        low=KIB,
        high=1024 * GIB,
    )
    max_answer_bytes: int = size(
        256 * MIB,
        "Answers held in memory at once until their readers have taken them; pages get shorter as it is used up, "
        "beyond it the answer is 503 overloaded.",
        small="readers that are far behind get short pages, and make many requests",
        large="the daemon's memory grows by as much under readers that do not read",
        low=MIB,
        high=1024 * GIB,
    )
    keep_alive_s: float = seconds(
        75.0,
        "How long an idle connection is kept.",
        small="clients that re-send a POST on a closed connection double messages (the JDK's keeps idle ones for 5 s)",
        large="connections of vanished clients count against http.max_connections for as long",
        low=1.0,
        high=86_400.0,
    )
    header_timeout_s: float = seconds(
        10.0,
        "How long the head of a request may take from its first byte to its last.",
        small="clients on slow lines are cut off",
        large="clients that send nothing more hold their connections",
        low=0.1,
        high=3_600.0,
    )
    body_timeout_s: float = seconds(
        30.0,
        "How long the body of a request may take from the end of its head; each 16 KiB received give a second more.",
        small="large bodies over slow lines are cut off",
        large="clients that stall hold memory against http.max_inflight_bytes",
        low=0.1,
        high=86_400.0,
    )
    send_timeout_s: float = seconds(
        30.0,
        "How long a client may take no byte of its answer before it is cut off.",
        small="readers that pause between pages of a long answer lose it",
        large="readers that stopped reading hold memory for as long",
        low=0.1,
        high=86_400.0,
    )
    flat_topic_properties: bool = switch(
        False, "Answer a GET of a topic with the bare property map, as the original service does for its clients."
    )
    gzip_min_bytes: int = size(
        1 * KIB,
        "Answers of at least so many bytes are compressed when the client accepts gzip.",
        small="time is spent on answers that do not shrink",
        large="answers that would shrink travel whole",
        low=0,
        high=1 * GIB,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the daemon says on its standard output."""

    format: str = choice("text", "Lines for people, or one JSON object a line for programs.", "text", "json")
    level: str = choice("info", "The least important lines to write.", "debug", "info", "warning", "error")
    queue_lines: int = count(
        10_000,
        "Lines that may wait for a slow output; further ones are dropped and counted, no request ever waits for a line.",
        small="bursts leave gaps in the log",
        large="memory is held while the output stands still",
        low=16,
        high=10_000_000,
    )
    access: bool = switch(False, "Write a line for every request; small publishes are served less often for it.")


@dataclass(frozen=True, slots=True)
class ShutdownConfig:
    """Leaving."""

    drain_s: float = seconds(
        10.0,
        "How long after SIGTERM the requests already taken may finish; parked polls are answered at once.",
        small="answers of large requests are cut off, and their clients must ask what happened",
        large="a stuck disk or client delays the exit by as much",
        low=0.0,
        high=3_600.0,
    )
