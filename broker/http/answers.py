"""Answers within bounds: one byte budget over the answers of all readers, shorter pages while it is short.

An answer holds memory from its page's reading until its last byte has left, and its reader decides when that is. So
what all answers hold together is counted. While little is left a page is cut, which a poll's always may be; while
nothing is left a request waits a little, and is then told to come back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from broker.http.status import answer_for
from protocol.errors import Overloaded

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer

#: Bodies up to this size are not counted: the kernel takes them at once, and a connection costs as much by itself.
FREE_BYTES = 4 << 10
#: What takes no more than this finds room in the last part of the budget, where nothing larger is let in.
SMALL_BYTES = 512 << 10
#: The last part, as a fraction of the budget.
LAST_PART = 8
#: A page takes no more than this fraction of what is left: those that come after it shall have something, too.
SHARE = 4
#: How long a request waits for room before it is refused.
PATIENCE_S = 2.0
#: What an answer that is passed on piece by piece may hold: the window of a link, and the piece at hand.
PASSED_BYTES = 768 << 10


class AnswerBudget:
    """The bytes that the answers of all requests may hold together, until their readers have taken them."""

    __slots__ = ("_large", "_small", "held_bytes", "max_bytes", "patience_s", "refused")

    def __init__(self, max_bytes: int = 1 << 62, patience_s: float = PATIENCE_S) -> None:
        self.max_bytes = max_bytes
        self.patience_s = patience_s
        self.held_bytes = 0
        #: Requests that were told to come back.
        self.refused = 0
        self._small: deque[_Waiting] = deque()
        self._large: deque[_Waiting] = deque()

    def room(self) -> AnswerRoom:
        """A place for the bytes of one answer at a time, nothing held yet."""
        return AnswerRoom(self)

    def share_of(self, least: int, most: int) -> int:
        """What a page may take now, from ``least`` to ``most`` bytes; 0: not even that is left."""
        if not self.held_bytes:
            return max(least, min(most, self.max_bytes))  # one answer is always possible, whatever its size
        left = self.max_bytes - self.held_bytes
        beyond_last_part = left - self.max_bytes // LAST_PART
        if least <= beyond_last_part:
            return min(most, max(least, beyond_last_part // SHARE))
        return least if least <= min(left, SMALL_BYTES) else 0

    def take_now(self, least: int, most: int) -> int:
        """Takes what ``share_of`` says, unless others have waited for as much; how much it is."""
        taken = 0 if self._large and least > SMALL_BYTES else self.share_of(least, most)
        self.held_bytes += taken
        return taken

    async def take(self, least: int, most: int) -> int:
        """Takes from ``least`` to ``most`` bytes, as soon as there are so many. Raises Overloaded: there never were."""
        if taken := self.take_now(least, most):
            return taken
        waiting = _Waiting(least, most)
        queue = self._small if least <= SMALL_BYTES else self._large
        queue.append(waiting)
        try:
            with trio.move_on_after(self.patience_s):
                await waiting.granted.wait()
        except BaseException:
            if waiting.taken:
                self.give_back(waiting.taken)
            raise
        finally:
            if not waiting.taken:
                queue.remove(waiting)
                self.give_back(0)  # there may be room for those who stood behind it
        if not waiting.taken:
            raise self.refusal()
        return waiting.taken

    def refusal(self) -> Overloaded:
        """What a request is told for which there is no room."""
        self.refused += 1
        return Overloaded(
            f"answers of {self.held_bytes} bytes wait for their readers, of {self.max_bytes} that may",
            hint="retry a little later, or raise http.max_answer_bytes",
        )

    def give_back(self, fewer_bytes: int) -> None:
        """Gives back what was taken, to those who wait first."""
        self.held_bytes -= fewer_bytes
        for queue in (self._small, self._large):
            while queue and (taken := self.share_of(queue[0].least, queue[0].most)):
                self.held_bytes += taken
                waiting = queue.popleft()
                waiting.taken = taken
                waiting.granted.set()


class _Waiting:
    """Who waits for room, and has got it when ``granted`` is set."""

    __slots__ = ("granted", "least", "most", "taken")

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self.taken = 0
        self.granted = trio.Event()


class AnswerRoom:
    """What the answer of one request holds of the budget; whoever made it releases it when the answer has left."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def has(self, size: int) -> bool:
        """Holds ``size`` bytes from now on, more or fewer than before; False: there are not so many, nothing changed."""
        more = size - self.held_bytes
        budget = self._budget
        if more <= 0:
            self.held_bytes = size
            if more:
                budget.give_back(-more)
            return True
        others = budget.held_bytes - self.held_bytes
        bound = budget.max_bytes if size <= SMALL_BYTES else budget.max_bytes - budget.max_bytes // LAST_PART
        if others and others + size > bound:
            return False
        budget.held_bytes += more
        self.held_bytes = size
        return True

    def must_have(self, size: int) -> None:
        """Holds ``size`` bytes, whether there are so many or not: of what cannot be refused any more."""
        self._budget.give_back(self.held_bytes - size)
        self.held_bytes = size

    def takes_now(self, most: int) -> bool:
        """Whether ``most`` bytes are held from now on, since the budget has plenty; else nothing has changed."""
        budget = self._budget
        return 2 * (budget.held_bytes + most) <= budget.max_bytes and self.has(most)

    async def take(self, least: int, most: int) -> int:
        """Holds from ``least`` to ``most`` bytes instead of what it held, as soon as it may; how many.

        Raises:
          Overloaded: there were not so many in time; nothing is held.
        """
        self.release()
        self.held_bytes = await self._budget.take(least, most)
        return self.held_bytes

    def refusal(self) -> Overloaded:
        """What its request is told when there is no room for it; counted."""
        return self._budget.refusal()

    def release(self) -> None:
        """Gives everything back; a second call does nothing."""
        if self.held_bytes:
            held, self.held_bytes = self.held_bytes, 0
            self._budget.give_back(held)


async def admitted(answer: HttpAnswer, room: AnswerRoom, *, only_looks: bool) -> HttpAnswer:
    """``answer``, with what its body takes held in ``room``; or the refusal instead of it, if there is no room.

    Args:
      only_looks: nothing was done by the request, so that it may be refused.
    """
    body = answer.body
    if isinstance(body, bytes):
        size = len(body)
        if size <= FREE_BYTES:
            room.release()
            return answer
    elif room.held_bytes:
        return answer  # its pages are counted as they are made
    else:
        size = PASSED_BYTES if answer.length is None else min(answer.length, PASSED_BYTES)
    if room.has(size):
        return answer
    if not only_looks:
        room.must_have(size)
        return answer
    try:
        await room.take(size, size)
    except Overloaded as error:
        if not isinstance(body, bytes):
            await body.aclose()
        return answer_for(error)
    except BaseException:
        if not isinstance(body, bytes):
            with trio.CancelScope(shield=True):
                await body.aclose()
        raise
    return answer
