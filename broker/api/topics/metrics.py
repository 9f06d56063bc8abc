"""Metrics of single topics, on a separate route: a scrape names its topics, so that the number of labels is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from broker.api.topics.stats import MAX_LOOKS, Counting
from broker.http.messages import Answer
from broker.metrics import VARY_ACCEPT, ReaderSample, TopicSample, render_topics
from broker.security.grants import parse_pattern
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import InvalidParameter, PlainsongError
from plainsong.protocol.ids import after
from plainsong.protocol.keys import READER, SYSTEM, DamagedRow, parse_system_key, stop_after
from plainsong.protocol.topic.asks import ListPointers, ListReaders, Stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.catalogue import Catalogue, Figures
    from broker.http.messages import Request
    from broker.security.grants import Pattern
    from plainsong.protocol.names import TopicName
    from storage.base import Row

#: Maximum number of topics, and of readers, in one scrape.
MAX_TOPICS = 1_000
MAX_READERS = 1_000
#: Maximum number of patterns in one ``match``.
MAX_PATTERNS = 100


@dataclass(frozen=True, slots=True)
class TopicMetrics:
    """The route of metrics by topic. Each instance answers for topics that it owns, so sums count each once."""

    catalogue: Catalogue
    counting: Counting
    turn: trio.Lock = field(default_factory=trio.Lock)
    """Serializes scrapes, since each may read many rows."""

    async def show(self, request: Request) -> Answer:
        """Return the metrics of topics that ``match`` names. Raises InvalidParameter, StoreError."""
        patterns = parse_match(request.parameters("match").get("match", "*:*"))
        async with self.turn:
            figures = {
                name: each
                for name, each in sorted((await self.catalogue.figures()).items())
                if self._shows(name, patterns)
            }
            if len(figures) > MAX_TOPICS:
                raise _too_many("topics", len(figures), MAX_TOPICS)
            readers = await self._readers(set(figures))
        topics = [self._sample(name, each) for name, each in figures.items()]
        body, content_type = render_topics(topics, readers, request.headers.get("accept", ""))
        return Answer(200, body, content_type, [VARY_ACCEPT])

    def _shows(self, name: TopicName, patterns: Sequence[Pattern]) -> bool:
        ownership = self.counting.ownership
        return any(each.matches(*name) for each in patterns) and (ownership is None or ownership.is_mine(name))

    def _sample(self, name: TopicName, figures: Figures) -> TopicSample:
        rates, oldest_ms = self.counting.rates, figures.oldest_ms
        return TopicSample(
            name,
            figures.messages,
            figures.bytes,
            max(0, self.catalogue.now_ms() - oldest_ms) / 1000 if oldest_ms else None,
            figures.hidden_messages,
            rates.publishing.total(name),
            rates.polling.total(name),
        )

    async def _readers(self, topics: set[TopicName]) -> list[ReaderSample]:
        """Return the samples of all readers of these topics. Opens only topics that have readers."""
        counting, now_ms = self.counting, self.catalogue.now_ms()
        named = {name: counting.named_readers.of(name, now_ms) for name in topics}
        busy = {name for name, readers in named.items() if readers} | (await self._with_kept(topics))
        known: list[tuple[TopicName, str, bytes]] = []
        for name in sorted(busy):
            try:
                kept = {each.name: each.reader.position for each in await counting.directory.ask(name, ListReaders())}
            except PlainsongError:
                continue  # deleted since the catalogue was read, or it cannot be loaded, which /readyz reports
            known += [(name, reader, position) for reader, position in kept.items()]
            known += [(name, reader, at.position) for reader, at in named[name].items() if reader not in kept]
            if len(known) > MAX_READERS:
                raise _too_many("readers", len(known), MAX_READERS)
        # Counts are exact if all of them together cost no more than the statistics of one topic.
        max_looks = MAX_LOOKS // max(1, len(known))
        samples = []
        for name, reader, position in known:
            try:
                found = await counting.directory.ask(name, Stats())
                undecided = await counting.directory.ask(name, ListPointers())
                numbers = await counting.before_reader(found, after(position), undecided, max_looks)
            except PlainsongError:
                continue
            samples.append(ReaderSample(name, reader, numbers["visible"], numbers["hidden"], numbers["expiredUnread"]))
        return samples

    async def _with_kept(self, topics: set[TopicName]) -> set[TopicName]:
        found: set[TopicName] = set()

        def take(rows: Sequence[Row]) -> bool:
            for key, _ in rows:
                try:
                    name = parse_system_key(key).name
                except DamagedRow:
                    continue
                if name in topics:
                    found.add(name)
            return True

        kept = SYSTEM + READER
        await self.counting.store.scan(Table.METADATA, kept, stop_after(kept), take, first_chunk=1000)
        return found


def parse_match(text: str) -> list[Pattern]:
    """Parse the patterns of ``match``. Raises InvalidParameter."""
    words = text.split(",")
    if len(words) > MAX_PATTERNS:
        raise InvalidParameter(f"match has {len(words)} patterns", hint=f"at most {MAX_PATTERNS}")
    try:
        found = [parse_pattern(each) for each in words]
    except ValueError:
        found = []
    if not found or any(each.is_service for each in found):
        raise InvalidParameter(f"match is {text[:80]!r}", hint="write namespace:topic; a * may end each: shop:*")
    return found


def _too_many(what: str, count: int, most: int) -> InvalidParameter:
    return InvalidParameter(
        f"match covers {count} {what}, but a scrape returns at most {most}",
        hint="match fewer topics, for example match=shop:orders-*",
    )
