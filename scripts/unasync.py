"""Generates the synchronous client ``plainsong/_sync`` from the asynchronous ``plainsong/_async``.

    python scripts/unasync.py            write the files
    python scripts/unasync.py --check    list the files that would change, and fail if there are any

The script removes ``async`` and ``await``, strips ``Async`` from names, and replaces sentences about tasks and event
loops by sentences about threads (``SENTENCES``). It omits a statement whose first line ends in ``# async only``, and
leaves modules alone that both sides write by hand (``BY_HAND``). The project's formatter formats the result.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TARGET = ROOT / "plainsong/_async", ROOT / "plainsong/_sync"
BY_HAND = {"__init__.py", "_backend.py", "_futures.py", "_hooks.py", "_pool.py"}
HEADER = "# Written by scripts/unasync.py from plainsong/_async/{name}: change that, and run it (make sync).\n"

WORDS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "StopAsyncIteration": "StopIteration",
    "AnyParticipant": "TransactionAware",
    "_async": "_sync",
}
#: Sentences about tasks, and their replacements about threads.
SENTENCES = (
    (
        """Talks to a daemon: topics, publishing, polling, reading, on asyncio and trio alike.

    It belongs to one event loop; any number of tasks may share it. Use it in an ``async with`` block, or ``aclose`` it.
    It connects on first use, so creating it needs no daemon. If a task is cancelled in the middle of a call, the outcome
    of the request is unknown, as after a broken connection.
""",
        """Talks to a daemon: topics, publishing, polling, reading.

    Thread-safe: all threads may share one. After a fork the child opens its own connections, and both processes can
    use the client. It connects on first use, so creating it needs no daemon.
""",
    ),
    ("Other tasks call it while the loop waits.", "Other threads, and signal handlers, call it while the loop waits."),
    ("from any thread (of the asynchronous client: any task).", "from any thread."),
    (
        """A buffer and the tasks that empty it; made by ``AsyncClient.publisher``, which explains the options.

    Use it in an ``async with`` block, which one task may enter and another leave. The order of ``send`` calls is the
    order in each topic, also across retries. The end of the block flushes; after an exception, within
    ``exit_timeout_s``. A cancelled block gives up the waiting messages, and logs it.
""",
        """A buffer and the threads that empty it; made by ``Client.publisher``, which explains the options.

    Thread-safe. The order of ``send`` calls is the order in each topic, also across retries; a lock orders calls of
    several threads. In a forked child it starts afresh: empty, with its own threads and connections; the parent sends
    the waiting messages, and their futures in the child say so. The exit of the interpreter closes it within
    ``exit_timeout_s``, and logs unsent messages.
""",
    ),
    (
        'Takes a message and returns its awaitable future. Waits only for room, if ``overflow="wait"``.',
        'Takes a message and returns its future. Waits only when the buffer is full and ``overflow="wait"``.',
    ),
    ("without its future being awaited", "without a caller retrieving it"),
    (
        "A buffered publisher, which does not wait for answers; use it in an ``async with`` block.",
        "A buffered publisher, which does not wait for answers; use it in a ``with`` block, or close it.",
    ),
    (
        "called with a ``DroppedMessage``, on the event loop; it must not wait.",
        "called with a ``DroppedMessage``, in a thread of the publisher or in ``send``.",
    ),
    (
        """    Use it in an ``async with`` block, which opens it; one task may enter it and another leave it. The order of calls is
    the order in the topic, and that of automatic sequence ids.
""",
        """    Thread-safe: the order of calls is the order in the topic, and that of automatic sequence ids. Use it in a ``with``
    block, or close it. In a forked child it is closed: the parent keeps the name.
""",
    ),
    (
        "Takes a message and returns the awaitable future of its ``MessageReceipt``. Never part of a transaction's block.",
        "Takes a message and returns the future of its ``MessageReceipt``. Never part of a transaction's block.",
    ),
    (
        """which explains the options. Use it in ``async with``.

    The order of calls is the order in the topic. The stream ends with its connection and sends nothing again: requests
    without an answer are unknown, unless the daemon closed in good order.
""",
        """which explains the options.

    Thread-safe. The order of calls is the order in the topic. The stream ends with its connection and sends nothing
    again: requests without an answer are unknown, unless the daemon closed in good order. A forked child must open
    its own.
""",
    ),
    (
        'CLOSED = "the stream is closed, or was never opened"',
        'CLOSED = "the stream is closed"',
    ),
    (
        "A connection that pipelines publishes; use it in an ``async with`` block.",
        "A connection that pipelines publishes; use it in a ``with`` block, or close it.",
    ),
    (
        "InvalidName: nothing happened. On entering the block: ConnectFailed, ShuttingDown: nothing happened.",
        "ConnectFailed, InvalidName, ShuttingDown: nothing happened.",
    ),
    (
        """    Several tasks may call ``publish``; everything else belongs to one task at a time. Cancelling a task inside the block
    undoes the transaction; in the middle of the commit, the commit is completed first.
""",
        """    Several threads may call ``publish``; everything else belongs to one thread at a time.
""",
    ),
    (
        """    Iterate over it once, in one task. With a position, a message is finished when the loop asks for the next one. Use
    it in an ``async with`` block: its normal end finishes the message at hand and saves the position; after an
    exception that message is delivered again. Without a block, a loop left early saves nothing more, and messages since
    the last save are delivered again.
""",
        """    Iterate over it once. With a position, a message is finished when the loop asks for the next one. If ``break``,
    ``return`` or an exception leaves the loop, the message at hand is not finished, and is delivered again; the normal
    end of a ``with`` block does finish it. Not thread-safe: one thread at a time.
""",
    ),
    (
        """    Iterate over it once, in one task, in an ``async with`` block, whose end closes the connection. When""",
        """    Iterate over it once, in one thread, in a ``with`` block, whose end closes the connection. When""",
    ),
    ("asynchronous iterator", "iterator"),
    (
        "Wraps a participant, asynchronous or not, and checks its results.",
        "Wraps a participant and checks its results.",
    ),
    (
        "    end, and a commit under way is completed. For one task at a time.",
        "    end, and a commit under way is completed. For one thread at a time.",
    ),
    ("How long a cancelled task may take to undo its transaction", "How long it may take to undo a transaction"),
    ("An ``async with``", "A ``with``"),
    ("in an ``async with``", "in a ``with``"),
    ("``async with``", "``with``"),
    ("Callable[[], Awaitable[T]]", "Callable[[], T]"),
    ("Callable[[], Awaitable[None]]", "Callable[[], None]"),
    ("Awaitable[None]", "None"),
    ("Awaitable[T]", "T"),
)


def generated(source: str, name: str) -> str:
    """The synchronous module, unformatted."""
    source = _without_async_only(source)
    for task, thread in SENTENCES:
        source = source.replace(task, thread)
    pieces: list[str] = []
    at = (1, 0)
    lines = source.splitlines(keepends=True)
    skip_space = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        gap = _between(lines, at, token.start)
        at = token.end
        text = token.string
        if token.type == tokenize.NAME and text in ("async", "await"):
            pieces.append(gap)
            skip_space = True
            continue
        pieces.append("" if skip_space else gap)
        skip_space = False
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            text = _renamed(text)
        pieces.append(text)
    text = "".join(pieces)
    return HEADER.format(name=name) + text


def _renamed(text: str) -> str:
    for word, other in WORDS.items():
        if other:
            text = re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", other, text)
    return re.sub(r"\bAsync(?=[A-Z])", "", text)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]] if start[0] <= len(lines) else ""
    first = lines[start[0] - 1][start[1] :]
    middle = lines[start[0] : end[0] - 1]
    last = lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else ""
    return first + "".join(middle) + last


def _without_async_only(source: str) -> str:
    lines = source.splitlines(keepends=True)
    drop: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and lines[node.lineno - 1].rstrip().endswith("# async only"):
            drop.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    return "".join(line for number, line in enumerate(lines) if number not in drop)


def formatted(text: str, name: str) -> str:
    """Sorts the imports and formats with the project's tools."""
    ruff = Path(sys.executable).with_name("ruff")
    path = str(TARGET / name)
    for command in (["check", "--select", "I,F401", "--fix-only", "--quiet"], ["format", "--quiet"]):
        arguments = [str(ruff), *command, "--stdin-filename", path, "-"]
        text = subprocess.run(  # noqa: S603 - the linter of this environment
            arguments, input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text


def main(arguments: list[str]) -> int:
    """The exit code: 1 where ``--check`` finds a difference."""
    differs = []
    wanted = {path.name for path in SOURCE.glob("*.py")} - BY_HAND
    for name in sorted(wanted):
        text = formatted(generated((SOURCE / name).read_text(encoding="utf-8"), name), name)
        target = TARGET / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            differs.append(name)
            if "--check" not in arguments:
                target.write_text(text, encoding="utf-8")
    for path in sorted(TARGET.glob("*.py")):
        if path.name not in wanted | BY_HAND:
            differs.append(path.name)
            if "--check" not in arguments:
                path.unlink()
    if "--check" in arguments and differs:
        print(f"plainsong/_sync is not what plainsong/_async makes of it: {', '.join(differs)}; run: make sync")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
