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
BY_HAND = {"__init__.py", "_backend.py", "_futures.py", "_hooks.py"}
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
    (
        """Closes all connections; requests under way fail. Idempotent. Its publishers end with their own blocks.\"""",
        """Closes its publishers, each within its ``exit_timeout_s``, then all connections. Idempotent.

        Raises:
          NotSent: its publishers could not send everything; all is closed nevertheless.
        \"""",
    ),
    (
        """A buffer and the tasks that empty it; made by ``AsyncClient.publisher``, which explains the options.

    Only within ``async with``: its tasks live in that block. The order of calls of ``send`` is the order in the
    topic, for each topic, whatever is retried. A block that ends well, or by an error, is flushed (the latter
    for no longer than ``exit_timeout_s``); one that is cancelled gives up what waits, and says so in the log.
""",
        """A buffer and the threads that empty it; made by ``Client.publisher``, which explains the options.

    Thread-safe. The order of calls of ``send`` is the order in the topic, for each topic, whatever is retried
    (calls from several threads are ordered as they get the lock). In a forked child it starts afresh: empty,
    with threads and connections of its own; what was waiting belongs to the parent, and its futures say so.
    When the interpreter exits, it is closed with a limit of ``exit_timeout_s``, and what was not sent is logged.
""",
    ),
    (
        'Hand over a message; what is returned may be awaited. Waits only for room, if ``overflow="wait"``.',
        'Hand over a message, and get its future; waits only when the buffer is full and ``overflow="wait"``.',
    ),
    ("flush and nobody awaited it.", "flush and nobody asked its future."),
    ("            nobody awaited it. Nothing", "            nobody asked its future. Nothing"),
    (
        "A buffered publisher, which does not wait for answers; use it in an ``async with`` block.",
        "A buffered publisher, which does not wait for answers; use it in a ``with`` block, or close it.",
    ),
    (
        "called with a ``DroppedMessage``, on the event loop; it must not wait.",
        "called with a ``DroppedMessage``, in a thread of the publisher or in ``send``.",
    ),
    (
        """    Only within ``async with``, which opens it: its task lives in that block. The order of calls is the order in the
    topic, and that of automatic sequence ids.
""",
        """    Thread-safe: the order of calls is the order in the topic, and that of automatic sequence ids. Use it in a ``with``
    block, or close it. In a forked child it is closed: the name belongs to the parent.
""",
    ),
    (
        "Hand over a message, and get what may be awaited for its ``MessageReceipt``. Not part of a transaction's block.",
        "Hand over a message, and get the future of its ``MessageReceipt``. Not part of a transaction's block.",
    ),
    (
        """which explains the options. Use it in ``async with``.

    The order of calls is the order in the topic. Ends with its connection: what was not answered then is unknown,
    unless the daemon closed in good order, and nothing is sent again.
""",
        """which explains the options.

    Thread-safe. The order of calls is the order in the topic. Ends with its connection: what was not answered then
    is unknown, unless the daemon closed in good order, and nothing is sent again. A forked child must open its own.
""",
    ),
    (
        'raise Closed("the stream is closed, or was never opened", hint="use it in an async with block")',
        'raise Closed("the stream is closed")',
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
        """    ``publish`` may be called from several tasks; everything else belongs to one task at a time. A task that is cancelled
    inside the block leaves the transaction undone; in the middle of the commit, the commit is brought to its end.
""",
        """    ``publish`` may be called from several threads; everything else belongs to one thread at a time.
""",
    ),
    (
        """    Iterate over it once, in one task. With a position, the loop is done with a message when it asks for the next
    one. Use it in an ``async with`` block: when that ends without an exception, the message at hand counts as
    done, and the position is saved; after an exception, that message comes again. Without a block, a loop that
    is left early saves nothing more: what came after the last save comes again.
""",
        """    Iterate over it once. With a position, the loop is done with a message when it asks for the next one; when
    the loop is left by ``break``, ``return`` or an exception, the message at hand does not count as done,
    and comes again. In a ``with`` block that ends without an exception it does count: ``with`` says that the
    work on it is finished. Not thread-safe: one thread at a time.
""",
    ),
    ("asynchronous iterator", "iterator"),
    ("A participant as the transaction calls it, asynchronous or not.", "A participant as the transaction calls it."),
    (
        "    end, and what is being committed is waited for. For one task at a time.",
        "    end, and what is being committed is waited for. For one thread at a time.",
    ),
    ("A lightweight transaction in the hands of a task", "A lightweight transaction in the hands of a thread"),
    ("How long a cancelled task may take to undo its transaction", "How long it may take to undo a transaction"),
    ("an asynchronous", "a"),
    ("In an ``async with``", "In a ``with``"),
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
