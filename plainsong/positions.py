"""Positions that outlive a process: in a file, or kept by the daemon.

A position is the id of the last message that a loop is done with. It is saved some time after that, never
before: after a crash what had not been saved is delivered again, and nothing is skipped.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from plainsong.core import calls
from plainsong.core.effects import Blocking
from plainsong.errors import PositionNotSaved
from plainsong.ids import MessageId
from plainsong.protocol.errors import NotFound, PositionChanged
from plainsong.protocol.names import reader_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations


class Position(Protocol):
    """Where a reader's positions are kept. Both methods are steps (``plainsong.core.effects``).

    One whose ``save`` writes into the transaction that the reader's loop is part of (a row that becomes durable
    with the rest of them, or not at all) has an attribute ``transactional = True``. In a transaction it is saved
    before the participants are asked to commit; every other position is saved after the commit, and not at all
    when there is none, so that what was read comes again.
    """

    def load(self, operations: Operations, topics: Iterable[str]) -> Steps[dict[str, bytes]]:
        """The positions known of ``topics``, by topic."""
        ...

    def save(self, operations: Operations, positions: Mapping[str, bytes]) -> Steps[None]:
        """Keep these, which are those that changed."""
        ...


class FilePosition:
    """Positions in a file of JSON, replaced as a whole and synced: it is the old one or the new one, never half.

    For one reader at a time. Topics of several namespaces and readers of several topics may share a file
    as long as one reader at a time uses it.

    Args:
      path: of the file; its directory must be there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._known: dict[str, str] = {}

    def load(self, operations: Operations, topics: Iterable[str]) -> Steps[dict[str, bytes]]:
        """Raises PositionNotSaved when the file is there and cannot be understood."""
        self._known = yield Blocking(self._read)
        found = {}
        for topic in topics:
            text = self._known.get(f"{operations.namespace}:{topic}")
            if text is not None:
                found[topic] = bytes(MessageId(text))
        return found

    def save(self, operations: Operations, positions: Mapping[str, bytes]) -> Steps[None]:
        """Raises PositionNotSaved: the file is what it was."""
        self._known.update({f"{operations.namespace}:{topic}": at.hex() for topic, at in positions.items()})
        yield Blocking(self._write)

    def _read(self) -> dict[str, str]:
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): str(MessageId(text)) for key, text in told["positions"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            detail = f"{self.path} cannot be read: {error}"
            raise PositionNotSaved(detail, hint="move it away to start anew") from error
        except Exception as error:
            detail = f"{self.path} holds what is no position: {error}"
            raise PositionNotSaved(detail, hint="move it away to start anew") from error

    def _write(self) -> None:
        text = json.dumps({"version": 1, "positions": self._known}, indent=1, sort_keys=True) + "\n"
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            raise PositionNotSaved(f"{self.path} cannot be written: {error}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of a file, at once and durably. Raises OSError: the file is what it was."""
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class ServerPosition:
    """Positions that the daemon keeps under a reader's name, one for each topic.

    Each save names the position it expects there: when somebody else has moved it, ``PositionChanged`` is
    raised in the loop, and nobody's work is silently undone.

    Args:
      name: of the reader: letters, digits, underscores and hyphens.
    Raises:
      InvalidName: it is none.
    """

    def __init__(self, name: str) -> None:
        self.name = reader_name(name)
        self._known: dict[str, bytes] = {}

    def load(self, operations: Operations, topics: Iterable[str]) -> Steps[dict[str, bytes]]:
        """Raises TopicNotFound, and what goes wrong on the way."""
        found = {}
        for topic in topics:
            position = yield from self._shown(operations, topic)
            if position is not None:
                found[topic] = position
        self._known.update(found)
        return found

    def save(self, operations: Operations, positions: Mapping[str, bytes]) -> Steps[None]:
        """Raises PositionChanged: somebody else uses the same name."""
        for topic, position in positions.items():
            expected = self._known.get(topic)
            call = calls.set_reader(operations.namespace, topic, self.name, position, compare=True, expected=expected)
            try:
                yield from operations.call(call)
            except PositionChanged:
                # Ours, if an earlier attempt took and its answer was lost.
                if (yield from self._shown(operations, topic)) != position:
                    raise
            self._known[topic] = position

    def _shown(self, operations: Operations, topic: str) -> Steps[bytes | None]:
        try:
            shown = yield from operations.call(calls.show_reader(operations.namespace, topic, self.name))
        except NotFound as error:
            if calls.is_missing_reader(error):
                return None
            raise
        return bytes(calls.position_of(shown))
