"""Quotas: limits on rates and concurrency, for a name, or for a topic shared by all names.

Free of I/O; the clock is an argument. Each rate is a token bucket of ``burst_s`` seconds. A request is admitted if its
bucket is not empty and covers the cost known so far, or if the bucket is full: so a request larger than the bucket is
possible. It leaves a debt, and the next ones wait. Costs that are known only once a request is read or answered are
charged then.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from broker.security.rights import MAX_PART
from plainsong.protocol.errors import QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from broker.security.grants import GrantTable, Quota
    from broker.security.identity import Identity
    from broker.security.peer import ConnectionSlot

#: Buckets that are kept; beyond that, full ones are dropped.
MAX_BUCKETS = 100_000
#: Names whose quotas are cached; beyond that, the cache is cleared.
MAX_NAMES = 10_000
#: Unit of a limit in ``RateLimit-Policy``; requests by default.
_UNITS = {"publish_bytes_per_s": "content-bytes", "poll_bytes_per_s": "content-bytes"}
#: Routes that the limits on publishes and on polls apply to.
PUBLISHES = frozenset(("publish", "store"))
POLLS = frozenset(("poll", "poll_many", "get_messages", "get_message", "follow", "list_chain"))
_OF_ALL = ("requests_per_s",)
_OF_PUBLISHES = ("requests_per_s", "publish_requests_per_s", "publish_messages_per_s", "publish_bytes_per_s")
_OF_POLLS = ("requests_per_s", "poll_bytes_per_s")
#: Limits on concurrency, as spelled in the grants file.
Counted: TypeAlias = Literal["connections", "parked_polls", "open_transactions"]


class _Place(NamedTuple):
    """The subject of a count: a name, or a topic for all names together. Counts survive a reload of the file."""

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
    """The cost of a request for one bucket."""

    limit: str
    bucket: _Bucket
    amount: float


def _limits_of(route: str) -> tuple[str, ...]:
    if route in PUBLISHES:
        return _OF_PUBLISHES
    return _OF_POLLS if route in POLLS else _OF_ALL


def _cost_of(limit: str, length: int) -> float:
    """Return the part of the cost that is known when a request begins; the rest is charged later."""
    if limit == "publish_bytes_per_s":
        return float(length)
    return 1.0 if limit in ("requests_per_s", "publish_requests_per_s") else 0.0


class Quotas:
    """The quotas of a grants file, and their current usage.

    Args:
      now_s: a monotonic clock.
      share: this process's fraction of each limit, when several processes serve one instance.
      refused: counts a refusal, by limit.
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
        """Count a refusal that another process of this instance made."""
        self._refused(limit)

    def replace(self, table: GrantTable) -> None:
        """Put the quotas of a file in force; buckets start full."""
        self._table = table if table.quotas else None
        self._of_names.clear()
        self._buckets.clear()

    @property
    def buckets(self) -> int:
        """Number of buckets that are kept."""
        return len(self._buckets)

    def concern(self, who: Identity) -> bool:
        """True if the name has a quota, or any topic has one."""
        table = self._table
        return table is not None and bool(self._quotas_of(who) or any(quota.on for quota in table.quotas))

    def enter(self, who: Identity, route: str, namespace: str, topic: str, length: int) -> None:
        """Admit a request, and charge the known cost. Raises QuotaExceeded: nothing was charged."""
        if self._table is None:
            return
        costs, lacking = self._costs(who, route, namespace, topic, length)
        if lacking is not None:
            self._refused(lacking.limit)
            raise _exceeded(*lacking)
        for _, bucket, cost in costs:
            bucket.level -= cost

    def allow(
        self,
        who: Identity,
        slot: ConnectionSlot | None,
        route: str,
        namespace: str,
        topic: str,
        length: int,
        *,
        takes: bool,
    ) -> bool:
        """True if ``connect`` and ``enter`` would admit a request on a connection that is already counted.

        False: call them; nothing was charged, and no refusal was counted.

        Args:
          takes: charge the cost of an admitted request.
        """
        if self._table is None:
            return slot is None or not slot.name
        if slot is not None and slot.name != ("" if self._most(who, "connections") is None else who.name):
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
        """Return the known costs of a request, and the first cost that its bucket cannot cover."""
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
        """Charge a cost that became known after the request was admitted."""
        if self._table is not None and cost:
            for quota, key in self._applying(who, namespace, topic):
                if limit in quota.limits:
                    self._bucket(quota, key, limit).level -= cost

    def pause_s(self, who: Identity, namespace: str, topic: str, size: int, requests: int) -> float:
        """Charge a part of a stream of publishes; return how long the next part has to wait.

        Args:
          requests: publishes answered since the last call; each counts as one message.
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
        """Return the bytes that a page may have within the quota; None if there is no limit.

        An admitted page has at least one message, whatever its size.
        """
        levels = [
            self._bucket(quota, key, "poll_bytes_per_s").level
            for quota, key in self._applying(who, namespace, topic)
            if "poll_bytes_per_s" in quota.limits
        ]
        return max(1, int(min(levels))) if levels else None

    def read_pause_s(self, who: Identity, namespace: str, topic: str, size: int) -> float:
        """Charge the bytes of an event stream; return how long the next ones have to wait."""
        return self._pause_s(who, namespace, topic, {"poll_bytes_per_s": size})

    # --- counts -----------------------------------------------------------------------------------

    def connect(self, who: Identity, slot: ConnectionSlot | None) -> None:
        """Count a connection for the name that uses it, until ``disconnect``, or until another name uses it.

        Raises:
          QuotaExceeded: the name is at its limit; close the connection.
        """
        if slot is None:
            return
        most = self._most(who, "connections")
        if slot.name and (most is None or slot.name != who.name):
            self.disconnect(slot)
        if most is None or slot.name:
            return
        place = _Place("connections", who.name)
        if self._counts.get(place, 0) >= most:
            raise self._too_many("connections", most)
        self._count(place)
        slot.name = who.name

    def disconnect(self, slot: ConnectionSlot) -> None:
        """Stop counting the connection. Idempotent."""
        if slot.name:
            self._discount([_Place("connections", slot.name)])
            slot.name = ""

    def park(self, who: Identity, namespace: str, topic: str) -> Callable[[], None]:
        """Count a waiting poll; return the function that ends it, once. Raises QuotaExceeded."""
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

    def check_begin(self, who: Identity, count: Callable[[str], int]) -> None:
        """Check that a name may begin a transaction.

        Args:
          count: returns the number of a name's transactions that are open, or about to begin.

        Raises:
          QuotaExceeded: the name is at its limit; nothing has begun.
        """
        most = self._most(who, "open_transactions")
        if most is not None and count(who.name) >= most:
            raise self._too_many("open_transactions", most)

    def max_topics(self, who: Identity) -> int | None:
        """Return the number of existing topics that a name may have created; None if there is no limit."""
        return self._most(who, "topics", shared=False)

    def too_many_topics(self, most: int) -> QuotaExceeded:
        """Count and return the refusal of another topic."""
        return self._too_many("topics", most)

    def _most(self, who: Identity, counted: str, *, shared: bool = True) -> int | None:
        """Return the lowest limit of a name; with ``shared`` this process's part of it."""
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
        """Yield each quota that applies to a request, with the key of its bucket: the name, or the topic."""
        table = self._table
        if table is None or not who.name:  # an unauthenticated request has no quota
            return
        for quota in self._quotas_of(who):
            yield quota, who.name
        if topic and len(namespace) <= MAX_PART and len(topic) <= MAX_PART:  # longer names cannot be topics
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
        """Drop full buckets: a new one would be equal."""
        for place, bucket in list(self._buckets.items()):
            bucket.fill(now_s)
            if bucket.level >= bucket.capacity:
                del self._buckets[place]
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()


def _exceeded(limit: str, bucket: _Bucket, cost: float) -> QuotaExceeded:
    wait_s = max(1, ceil((min(cost, bucket.capacity) - bucket.level) / bucket.rate))
    error = QuotaExceeded(f"{limit} is used up", hint=f"wait {wait_s} s, or send less; an operator can raise the quota")
    unit = f';qu="{_UNITS[limit]}"' if limit in _UNITS else ""
    error.retry_after_s = wait_s
    error.policy = f'"{limit}";q={int(bucket.rate)};w=1{unit}'
    error.state = f'"{limit}";r={max(0, int(bucket.level))};t={wait_s}'
    return error


def _too_many(limit: str, most: int) -> QuotaExceeded:
    error = QuotaExceeded(
        f"{limit} is used up: there are already {most}", hint="end one first; an operator can raise the quota"
    )
    error.ends_connection = limit == "connections"
    error.policy = f'"{limit}";q={most}'
    error.state = f'"{limit}";r=0;t=1'
    return error
