"""Quotas: how much a name, or everybody together on a topic, may ask for in a while, and have at a time.

Pure but for the time it is given. Each rate is a token bucket of ``burst_s`` seconds. A request is let in while its bucket
is not empty, and owes what it takes beyond: so one that is larger than the bucket passes when the bucket is full, and the
next ones wait for it. What a request costs may only be known when it was read or answered; it is owed then.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from broker.security.rights import MAX_PART
from plainsong.protocol.errors import QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from broker.http.peer import Seat
    from broker.security.grants import GrantTable, Quota
    from broker.security.identity import Identity

#: Buckets that are kept; beyond, those that are full are forgotten.
MAX_BUCKETS = 100_000
#: Names whose quotas are kept ready; beyond, they are worked out again.
MAX_NAMES = 10_000
#: What a limit counts, as in ``RateLimit-Policy``.
_UNITS = {"publish_bytes_per_s": "content-bytes", "poll_bytes_per_s": "content-bytes"}
#: Routes whose requests and answers the limits of their names are about.
PUBLISHES = frozenset(("publish", "store"))
POLLS = frozenset(("poll", "poll_many", "get_messages", "get_message", "follow", "list_chain"))
_OF_ALL = ("requests_per_s",)
_OF_PUBLISHES = ("requests_per_s", "publish_requests_per_s", "publish_messages_per_s", "publish_bytes_per_s")
_OF_POLLS = ("requests_per_s", "poll_bytes_per_s")
#: What is counted while it lasts, by its word in the file.
Counted: TypeAlias = Literal["connections", "parked_polls", "open_transactions"]


class _Place(NamedTuple):
    """Whose count it is: of a name, or of a topic for all names together. It outlives a change of the file."""

    counted: Counted
    name: str
    topic: str = ""


class _Bucket:
    __slots__ = ("capacity", "level", "rate", "since_s")

    def __init__(self, rate: float, burst_s: float, now_s: float) -> None:
        self.rate = rate
        self.capacity = rate * burst_s
        self.level = self.capacity
        self.since_s = now_s

    def fill(self, now_s: float) -> None:
        self.level = min(self.capacity, self.level + max(0.0, now_s - self.since_s) * self.rate)
        self.since_s = now_s


class _Cost(NamedTuple):
    """What a request takes of a bucket."""

    limit: str
    bucket: _Bucket
    amount: float


def _limits_of(route: str) -> tuple[str, ...]:
    if route in PUBLISHES:
        return _OF_PUBLISHES
    return _OF_POLLS if route in POLLS else _OF_ALL


def _cost_of(limit: str, length: int) -> float:
    """What is known of it when a request begins; the rest is owed."""
    if limit == "publish_bytes_per_s":
        return float(length)
    return 1.0 if limit in ("requests_per_s", "publish_requests_per_s") else 0.0


class Quotas:
    """The quotas of a grants file, and how far each is used up.

    Args:
      now_s: a clock that does not go back.
      share: of each limit, where several processes count for one instance.
      refused: counts a refusal by the limit.
    """

    def __init__(
        self, now_s: Callable[[], float], *, share: float = 1.0, refused: Callable[[str], None] = lambda limit: None
    ) -> None:
        self._now_s = now_s
        self._share = share
        self._refused = refused
        self._table: GrantTable | None = None
        self._of_names: dict[tuple[str, tuple[str, ...]], tuple[Quota, ...]] = {}
        self._buckets: dict[tuple[int, str, str], _Bucket] = {}
        self._counts: dict[_Place, int] = {}

    def count_refusal(self, limit: str) -> None:
        """Counts a refusal that another process of this instance gave."""
        self._refused(limit)

    def replace(self, table: GrantTable) -> None:
        """Puts the quotas of a file in force; buckets begin full."""
        self._table = table if table.quotas else None
        self._of_names.clear()
        self._buckets.clear()

    @property
    def buckets(self) -> int:
        """How many buckets are kept."""
        return len(self._buckets)

    def concern(self, who: Identity) -> bool:
        """Whether a name, or a topic that it may ask about, has a quota at all."""
        table = self._table
        return table is not None and bool(self._quotas_of(who) or any(quota.on for quota in table.quotas))

    def enter(self, who: Identity, route: str, namespace: str, topic: str, length: int) -> None:
        """Lets a request in, and takes what is known of its cost. Raises QuotaExceeded: it took nothing."""
        if self._table is None:
            return
        costs, lacking = self._costs(who, route, namespace, topic, length)
        if lacking is not None:
            self._refused(lacking.limit)
            raise _exceeded(*lacking)
        for _, bucket, cost in costs:
            bucket.level -= cost

    def allow(
        self, who: Identity, seat: Seat | None, route: str, namespace: str, topic: str, length: int, *, takes: bool
    ) -> bool:
        """Whether ``connect`` and ``enter`` would let a request in that comes on a connection which is counted already.

        False: they have to be asked; nothing was taken, and no refusal is counted.

        Args:
          takes: it is let in, and its cost is taken.
        """
        if self._table is None:
            return seat is None or not seat.name
        if seat is not None and seat.name != ("" if self._most(who, "connections") is None else who.name):
            return False
        costs, lacking = self._costs(who, route, namespace, topic, length)
        if lacking is not None:
            return False
        if takes:
            for _, bucket, cost in costs:
                bucket.level -= cost
        return True

    def _costs(
        self, who: Identity, route: str, namespace: str, topic: str, length: int
    ) -> tuple[list[_Cost], _Cost | None]:
        """What a request costs by what is known of it, and that of it which there is not enough left for."""
        costs: list[_Cost] = []
        limits = _limits_of(route)
        for quota, key in self._applying(who, namespace, topic):
            for limit in limits:
                if limit in quota.limits:
                    bucket = self._bucket(quota, key, limit)
                    cost = _Cost(limit, bucket, _cost_of(limit, length))
                    if bucket.level <= 0 or (bucket.level < cost.amount and bucket.level < bucket.capacity):
                        return costs, cost
                    costs.append(cost)
        return costs, None

    def owe(self, who: Identity, namespace: str, topic: str, limit: str, cost: float) -> None:
        """Takes what turned out to be the cost of a request that was let in."""
        if self._table is not None and cost:
            for quota, key in self._applying(who, namespace, topic):
                if limit in quota.limits:
                    self._bucket(quota, key, limit).level -= cost

    def pause_s(self, who: Identity, namespace: str, topic: str, size: int, requests: int) -> float:
        """Takes what came by a stream of publishes, and says how long the next has to wait.

        Args:
          requests: those that were answered since the last time; each counts as one message.
        """
        costs = {**dict.fromkeys(_OF_PUBLISHES, requests), "publish_bytes_per_s": size}
        return self._pause_s(who, namespace, topic, costs)

    def _pause_s(self, who: Identity, namespace: str, topic: str, costs: Mapping[str, float]) -> float:
        pause_s = 0.0
        for quota, key in self._applying(who, namespace, topic):
            for limit, cost in costs.items():
                if limit in quota.limits:
                    bucket = self._bucket(quota, key, limit)
                    bucket.level -= cost
                    pause_s = max(pause_s, -bucket.level / bucket.rate)
        return pause_s

    def page_bytes(self, who: Identity, namespace: str, topic: str) -> int | None:
        """How many bytes a page may have, so that it fits into what is left; None: as many as any.

        A page that is let in has one message at least, whatever it takes.
        """
        levels = [
            self._bucket(quota, key, "poll_bytes_per_s").level
            for quota, key in self._applying(who, namespace, topic)
            if "poll_bytes_per_s" in quota.limits
        ]
        return max(1, int(min(levels))) if levels else None

    def read_pause_s(self, who: Identity, namespace: str, topic: str, size: int) -> float:
        """Takes the bytes of a stream of events, and says how long the next have to wait."""
        return self._pause_s(who, namespace, topic, {"poll_bytes_per_s": size})

    # --- counts -----------------------------------------------------------------------------------

    def connect(self, who: Identity, seat: Seat | None) -> None:
        """Counts a connection for the name that asks on it, until ``disconnect``, or until another name asks on it.

        Raises:
          QuotaExceeded: the name has as many already; the connection has to end.
        """
        if seat is None:
            return
        most = self._most(who, "connections")
        if seat.name and (most is None or seat.name != who.name):
            self.disconnect(seat)
        if most is None or seat.name:
            return
        place = _Place("connections", who.name)
        if self._counts.get(place, 0) >= most:
            raise self._too_many("connections", most)
        self._count(place)
        seat.name = who.name

    def disconnect(self, seat: Seat) -> None:
        """The connection has ended. Idempotent."""
        if seat.name:
            self._discount([_Place("connections", seat.name)])
            seat.name = ""

    def park(self, who: Identity, namespace: str, topic: str) -> Callable[[], None]:
        """Counts a poll that waits; the function that ends it, once. Raises QuotaExceeded."""
        held: list[_Place] = []
        for quota, key in self._applying(who, namespace, topic):
            if "parked_polls" in quota.limits:
                place = _Place("parked_polls", "", key) if quota.on else _Place("parked_polls", key)
                most = self._limit(quota, "parked_polls")
                if self._counts.get(place, 0) - held.count(place) >= most:
                    self._discount(held)
                    raise self._too_many("parked_polls", most)
                if place not in held:
                    self._count(place)
                    held.append(place)
        return lambda: self._discount(held)

    def opening(self, who: Identity, count: Callable[[str], int]) -> Callable[[], None]:
        """Counts a transaction that begins as open, until the function that is returned is called, once.

        Args:
          count: how many a name has open.

        Raises:
          QuotaExceeded: it would be one too many; nothing has begun.
        """
        most = self._most(who, "open_transactions")
        if most is None:
            return lambda: None
        place = _Place("open_transactions", who.name)
        if count(who.name) + self._counts.get(place, 0) >= most:
            raise self._too_many("open_transactions", most)
        self._count(place)
        return lambda: self._discount([place])

    def max_topics(self, who: Identity) -> int | None:
        """How many topics a name may have made that are there; None: any number."""
        return self._most(who, "topics", shared=False)

    def too_many_topics(self, most: int) -> QuotaExceeded:
        """The refusal of one more topic; counted."""
        return self._too_many("topics", most)

    def _most(self, who: Identity, counted: str, *, shared: bool = True) -> int | None:
        """The least limit of a name; ``shared``: each of several processes has its part."""
        limits = [quota.limits[counted] for quota in self._quotas_of(who) if counted in quota.limits]
        return max(1, ceil(min(limits) * (self._share if shared else 1.0))) if limits else None

    def _too_many(self, counted: str, most: int) -> QuotaExceeded:
        self._refused(counted)
        return _too_many(counted, most)

    def _count(self, place: _Place) -> None:
        self._counts[place] = self._counts.get(place, 0) + 1

    def _discount(self, places: list[_Place]) -> None:
        while places:
            place = places.pop()
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._counts[place]

    # --- buckets ----------------------------------------------------------------------------------

    def _applying(self, who: Identity, namespace: str, topic: str) -> Iterator[tuple[Quota, str]]:
        """Each quota that a request comes under, and whose bucket it is: the name's, or the topic's."""
        table = self._table
        if table is None or not who.name:  # a route that asks nobody is nobody's to use up
            return
        for quota in self._quotas_of(who):
            yield quota, who.name
        if topic and len(namespace) <= MAX_PART and len(topic) <= MAX_PART:  # else there is no such topic
            for quota in table.quotas:
                if quota.on and any(pattern.matches(namespace, topic) for pattern in quota.on):
                    yield quota, f"{namespace}:{topic}"

    def _quotas_of(self, who: Identity) -> tuple[Quota, ...]:
        table = self._table
        if table is None or not who.name:
            return ()
        key = who.name, who.groups
        found = self._of_names.get(key)
        if found is None:
            if len(self._of_names) >= MAX_NAMES:
                self._of_names.clear()
            chosen = (quota for quota in table.quotas if quota.to and table.applies(quota.to, who.name, who.groups))
            found = self._of_names[key] = tuple(chosen)
        return found

    def _limit(self, quota: Quota, limit: str) -> int:
        return max(1, ceil(quota.limits[limit] * self._share))

    def _bucket(self, quota: Quota, key: str, limit: str) -> _Bucket:
        now_s = self._now_s()
        place = quota.line, key, limit
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= MAX_BUCKETS:
                self._forget(now_s)
            bucket = self._buckets[place] = _Bucket(quota.limits[limit] * self._share, quota.burst_s, now_s)
        bucket.fill(now_s)
        return bucket

    def _forget(self, now_s: float) -> None:
        """Makes room: a bucket that is full says nothing."""
        for place, bucket in list(self._buckets.items()):
            bucket.fill(now_s)
            if bucket.level >= bucket.capacity:
                del self._buckets[place]
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()


def _exceeded(limit: str, bucket: _Bucket, cost: float) -> QuotaExceeded:
    wait_s = max(1, ceil((min(cost, bucket.capacity) - bucket.level) / bucket.rate))
    error = QuotaExceeded(f"{limit} is used up", hint=f"go slower, or wait {wait_s} s; an operator can raise it")
    unit = f';qu="{_UNITS[limit]}"' if limit in _UNITS else ""
    error.retry_after_s = wait_s
    error.policy = f'"{limit}";q={int(bucket.rate)};w=1{unit}'
    error.state = f'"{limit}";r={max(0, int(bucket.level))};t={wait_s}'
    return error


def _too_many(limit: str, most: int) -> QuotaExceeded:
    error = QuotaExceeded(f"{limit}: there are {most} already", hint="end one first; an operator can raise it")
    error.ends_connection = limit == "connections"
    error.policy = f'"{limit}";q={most}'
    error.state = f'"{limit}";r=0;t=1'
    return error
