"""The transactions that the running code is in the blocks of: where ``client.publish`` finds the one it is part of.

A context variable: a task started inside a block is inside it too, a thread is not (unless it is run in a copy of
the context). A client knows the block of a transaction of its own only.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from plainsong.errors import TransactionInProgress

if TYPE_CHECKING:
    from plainsong.transactions.course import Course


class Block(Protocol):
    """A transaction as a block of code."""

    @property
    def client(self) -> Any:
        """Whose it is."""
        ...

    @property
    def course(self) -> Course:
        """What becomes of it."""
        ...


B = TypeVar("B", bound=Block)
Entered = Token[tuple[Block, ...]]

#: From the outermost to the innermost.
_blocks: ContextVar[tuple[Block, ...]] = ContextVar("plainsong_transactions", default=())


def block_of(client: object, kind: type[B]) -> B | None:
    """The block that the running code is in, of one client's transactions; also when that has ended."""
    for block in reversed(_blocks.get()):
        if block.client is client and isinstance(block, kind):
            return block
    return None


def check_free(block: Block) -> None:
    """Raises TransactionInProgress inside of another block of the same client: there are no nested ones."""
    for outer in _blocks.get():
        if outer.client is block.client and outer.course.transaction is not None:
            raise TransactionInProgress(
                f"transaction {outer.course.transaction.id} is under way here, and transactions do not nest",
                hint="take part in it (add, publish), or begin the other one in another thread or before this block",
            )


def enter(block: Block) -> Entered:
    """The running code is inside from now on."""
    return _blocks.set((*_blocks.get(), block))


def leave(entered: Entered) -> None:
    """It is outside again."""
    with suppress(ValueError):  # left in another context than it was entered in, which has a list of its own
        _blocks.reset(entered)
