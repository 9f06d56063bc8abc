"""The topics of a reader: those that its names and patterns match, the place in each, and the one to poll next."""

from __future__ import annotations

from collections import deque
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from plainsong import calls
from plainsong.messages import Origin
from plainsong.positions import WILD, Track
from plainsong.protocol import ids
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from plainsong._async.progress import AsyncProgress
    from plainsong._async.retry import AsyncChannel
    from plainsong.positions import Plan, Start
    from plainsong.protocol.page import Held

#: How often a pattern is matched against the existing topics.
REFRESH_S = 10.0


#: Topics that one waiting poll can name, as docs/http.md says.
MAX_TOPICS = 1_000


class AsyncTracks:
    """A track for each topic. They take turns: the one that was taken comes last."""

    def __init__(self, channel: AsyncChannel, plan: Plan, progress: AsyncProgress) -> None:
        for topic in plan.topics:
            if not WILD & set(topic):
                topic_name(channel.namespace, topic)
        self._channel = channel
        self._plan = plan
        self._progress = progress
        self._turns: deque[Track] = deque()
        self._refresh_s = 0.0
        #: False until ``begin`` has succeeded.
        self.are_known = False

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def held(self) -> dict[str, Held]:
        """The blocking transaction of each blocked topic, as of its last poll."""
        return {track.origin.topic: track.held for track in self._turns if track.held is not None}

    # --- which topics ----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Finds the topics, and where to begin in each: all of them, or none after an error."""
        names = await self._matching()
        self._refresh_s = self._channel.now() + REFRESH_S
        self._turns.clear()
        await self._add(names, self._plan.start)
        self.are_known = True

    async def refresh(self) -> None:
        """Finds new topics that a pattern matches, if it is time to look for them."""
        now_s = self._channel.now()
        if not self._plan.patterns or now_s < self._refresh_s:
            return
        self._refresh_s = now_s + REFRESH_S
        known = {track.origin.topic for track in self._turns}
        new = [name for name in (await self._matching()) if name not in known]
        # They are newer than the last refresh, so all their messages are new.
        await self._add(new, None)

    def forget_missing(self, track: Track) -> bool:
        """Drops the track of a topic that does not exist. Returns False, and keeps it, if the reader names the topic."""
        if track.origin.topic in self._plan.topics:
            return False
        self._turns.remove(track)
        return True

    async def _matching(self) -> list[str]:
        """The topics that the names and patterns match now."""
        patterns = self._plan.patterns
        names = [topic for topic in self._plan.topics if topic not in patterns]
        if patterns:
            there = await self._channel.call(calls.list_topics(self._channel.namespace))
            names += [topic for topic in there if any(fnmatchcase(topic, pattern) for pattern in patterns)]
        return list(dict.fromkeys(names))

    async def _add(self, names: list[str], start: Start) -> None:
        """Adds topics at their saved positions, or at ``start``, which is then saved: all of them, or none after an error."""
        channel = self._channel
        saved = await self._progress.load(channel, names)
        first: dict[str, bytes] = {}
        tracks: list[Track] = []
        for name in names:
            at: bytes | int | None = saved.get(name)
            if at is None:
                at = await channel.resolve(name, start)
                if (
                    at is not None
                    and (bound := at if isinstance(at, bytes) else ids.before(ids.bound_at(at))) is not None
                ):
                    first[name] = bound
            until = await channel.resolve_end(name, self._plan.until)
            tracks.append(Track(Origin(name, self._plan.serializer), at, until))
        await self._progress.save_starts(channel, first)
        # Only now: work that an error or the time of ``get`` cut off is repeated, and a topic that was here twice would
        # be delivered twice.
        self._turns.extend(tracks)

    # --- whose turn ------------------------------------------------------------------------------

    def next_with_more(self) -> Track | None:
        """The next topic in turn that has more messages; None if all are at their end."""
        for _ in range(len(self._turns)):
            if not (track := self.next()).at_end:
                return track
        return None

    def next(self) -> Track:
        """The next topic in turn, which then comes last."""
        self._turns.rotate(-1)
        return self._turns[-1]

    def next_many(self) -> dict[str, Track]:
        """As many topics as one poll can wait for, the next in turn first."""
        tracks = {track.origin.topic: track for track in list(self._turns)[:MAX_TOPICS]}
        if len(self._turns) > MAX_TOPICS:
            self._turns.rotate(-MAX_TOPICS)
        return tracks
