"""Delivering a batch, and closing publishers: what threads do, apart from waiting for each other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from plainsong.core.batches import attempt_of, bug_of, outcome_of
from plainsong.errors import NotSent
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.core.effects import Answer, Failure, Send
    from plainsong.core.gathering import Batch
    from plainsong.core.operations import Operations
    from plainsong.messages import Receipt
    from plainsong.sync.sent import Sent

log = logging.getLogger("plainsong.publisher")


class Closing(Protocol):
    """A publisher or a producer."""

    exit_timeout_s: float

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, for so long at most."""
        ...


def attempt(
    operations: Operations, carry: Callable[[Send], Answer | Failure], batch: Batch[Sent], left_s: float
) -> tuple[Receipt | None, PlainsongError | None]:
    """Send a batch once, for no longer than ``left_s``: its receipt, or what went wrong. Never raises."""
    try:
        send, call = attempt_of(operations, batch, left_s)
        return outcome_of(operations, call, carry(send), send.url)
    except PlainsongError as error:
        return None, error
    except Exception as bug:  # a thread that died would leave its futures waiting for ever
        log.exception("a request could not be made")
        return None, bug_of(bug)


def close_all(publishers: Iterable[Closing]) -> None:
    """Close each with a limit of its ``exit_timeout_s``. Raises NotSent for all of them together, when all are closed."""
    left: list[NotSent] = []
    for publisher in publishers:
        try:
            publisher.close(publisher.exit_timeout_s)
        except NotSent as not_sent:
            left.append(not_sent)
    if left:
        raise NotSent(sum(each.unsent for each in left), sum(each.unknown for each in left))
