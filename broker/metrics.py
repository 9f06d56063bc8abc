"""The daemon's metrics, in Prometheus text with base units and bounded label sets; and the rates of topics.

Counters and histograms are updated by the code that they measure. Figures of actors, the store or the cache are read at
each scrape. No label is a topic, a client or a path, since clients determine how many of these there are. A metric that
cannot be read is counted, and never fails a request.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import State

log = logging.getLogger(__name__)
#: Seconds; from a cached answer to a stalled disk.
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
#: Commits slower than this are reported to operators.
SLOW_COMMIT_S = 1.0
SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000, 100_000)


class SlowCommit(NamedTuple):
    """A commit that was slow to become durable."""

    seconds: float
    at_s: float
    """On the clock of ``perf_counter``."""


class Metrics:
    """All metrics of one daemon; implements ``actors.observe.Observer``."""

    def __init__(self, version: str) -> None:
        self.version = version
        # The text format has no use for a series with each counter's creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self._counters()
        self._histograms()
        ProcessCollector(registry=self.registry)
        build = Gauge("plainsong_build_info", "The running version.", ["version"], registry=self.registry)
        build.labels(version).set(1)
        self.readings = Readings(self._scrape_errors)
        self.registry.register(self.readings)
        #: Updated on the hot path, and read at each scrape.
        self._answers: dict[tuple[str, int], int] = {}
        self._published = 0
        #: The last slow commit; None if there was none.
        self.slow_commit: SlowCommit | None = None
        self.registry.register(_HotCounters(self._answers, lambda: self._published))

    def _counters(self) -> None:
        registry = self.registry
        self._producer_events = Counter(
            "plainsong_producer_events_total",
            "Outcomes of producers' requests, and changes of producers, by event.",
            ["event"],
            registry=registry,
        )
        self._crashes = Counter(
            "plainsong_actor_falls_total",
            "Failures of topics' actors, after each of which the topic is reloaded.",
            registry=registry,
        )
        self._handshakes = Counter(
            "plainsong_tls_handshakes_total", "TLS handshakes, by result.", ["result"], registry=registry
        )
        #: Called for each topic that another instance has claimed; None for no call.
        self.on_deposed: Callable[[], None] | None = None
        self._deposed = Counter(
            "plainsong_topics_deposed_total",
            "Topics open here that another instance claimed.",
            registry=registry,
        )
        self._expired = Counter("plainsong_expired_rows_total", "Expired rows removed.", registry=registry)
        self._purged = Counter(
            "plainsong_purged_rows_total", "Rows of deleted topics and older generations removed.", registry=registry
        )
        self._decided = Counter(
            "plainsong_transactions_decided_total", "Transactions decided, by state.", ["state"], registry=registry
        )
        self._timed_out = Counter(
            "plainsong_transaction_timeouts_total", "Transactions that timed out.", registry=registry
        )
        self._conflicts = Counter(
            "plainsong_transaction_conflicts_total",
            "Change sets that conflicted with a committed one.",
            registry=registry,
        )
        self._service_crashes = Counter(
            "plainsong_transaction_service_falls_total",
            "Failures of the transaction service, after each of which it is reloaded.",
            registry=registry,
        )
        self._held = Counter(
            "plainsong_polls_held_total", "Polls that an undecided transaction held.", registry=registry
        )
        self._scrape_errors = Counter(
            "plainsong_metric_errors_total", "Metrics that could not be read for a scrape.", registry=registry
        )

        self._forwarded = Counter(
            "plainsong_forwarded_requests_total",
            "Requests passed between instances, by direction.",
            ["direction"],
            registry=registry,
        )
        self._forward_retries = Counter(
            "plainsong_forward_retries_total", "Retries while locating a topic's owner.", registry=registry
        )
        self._no_owner = Counter(
            "plainsong_no_owner_answers_total", "Requests whose topic's owner was not found in time.", registry=registry
        )

        self._authentications = Counter(
            "plainsong_authentications_total",
            "Credentials checked, by method and result; a connection's are checked once.",
            ["via", "result"],
            registry=registry,
        )
        self._forbidden = Counter(
            "plainsong_forbidden_total",
            "Requests refused because the caller's name lacks the verb.",
            ["verb"],
            registry=registry,
        )
        self._security_reload_failures = Counter(
            "plainsong_security_reload_failures_total",
            "Failed reloads of the files of tokens, grants or keys; the previous files stay in force.",
            registry=registry,
        )

        self._quota_refusals = Counter(
            "plainsong_quota_refusals_total",
            "Requests beyond a quota of the grants file.",
            ["quota"],
            registry=registry,
        )
        self._audit_lost = Counter(
            "plainsong_audit_lost_total", "Audit records that could not be written to system:audit.", registry=registry
        )

    def _histograms(self) -> None:
        registry = self.registry
        self._latency = Distributions(
            "plainsong_request_duration_seconds",
            "Time from the complete request to its answer, by route, including polls that wait.",
            LATENCY_BUCKETS_S,
            label="route",
        )
        messages = Distributions("plainsong_commit_messages", "Messages in one commit.", SIZE_BUCKETS)
        requests = Distributions("plainsong_commit_requests", "Publishes in one commit.", SIZE_BUCKETS)
        sync = Distributions("plainsong_sync_duration_seconds", "Time to make one commit durable.", LATENCY_BUCKETS_S)
        end_to_end = Distributions(
            "plainsong_end_to_end_seconds",
            "Time from a message's publish to its delivery, for polls that waited for it.",
            LATENCY_BUCKETS_S,
        )
        self._commit_messages, self._commit_requests, self._sync = messages.of(), requests.of(), sync.of()
        self._end_to_end = end_to_end.of()
        for each in (self._latency, messages, requests, sync, end_to_end):
            registry.register(each)
        self._load = Histogram(
            "plainsong_topic_load_duration_seconds",
            "Time to load one topic from disk.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._handed_over = Histogram(
            "plainsong_handover_duration_seconds",
            "Time from a change of ownership until all topics that moved away are released.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._loop_lag = Histogram(
            "plainsong_loop_lag_seconds",
            "Delay between a task's scheduled time and its start on the event loop.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    # --- requests ------------------------------------------------------------------------------

    def requested(self, route: str, status: int, seconds: float, requests: int = 1) -> None:
        """Count an answer, or several sent as one. ``route`` is a route's name, never text of the client."""
        key = (route, status)
        counts = self._answers
        counts[key] = counts.get(key, 0) + requests
        self._latency.of(route).observe(seconds)

    def delivered_after(self, seconds: float) -> None:
        """Record the time from publish to delivery, for a poll that waited."""
        self._end_to_end.observe(seconds)

    def lagged(self, seconds: float) -> None:
        """Record how late the event loop woke a task."""
        self._loop_lag.observe(seconds)

    def held(self) -> None:
        """Count a poll that found an undecided message first."""
        self._held.inc()

    def producer_refused(self, code: str) -> None:
        """Count a refusal of a producer's request."""
        self._producer_events.labels(code).inc()

    def forwarded(self, direction: str) -> None:
        """Count a request that was forwarded to its owner (``out``), or arrived from another instance (``in``)."""
        self._forwarded.labels(direction).inc()

    def forward_retried(self) -> None:
        """Count another attempt to find the owner of a name."""
        self._forward_retries.inc()

    def no_owner_found(self) -> None:
        """Count a name whose owner was not found in time."""
        self._no_owner.inc()

    # --- security ------------------------------------------------------------------------------

    def authenticated(self, via: str, result: str) -> None:
        """Count an authentication."""
        self._authentications.labels(via, result).inc()

    def forbidden(self, verb: str) -> None:
        """Count a request that was refused because the client lacks this verb."""
        self._forbidden.labels(verb).inc()

    def security_reload_failed(self, what: str) -> None:
        """Count a changed file that could not be used."""
        del what
        self._security_reload_failures.inc()

    def quota_refused(self, limit: str) -> None:
        """Count a refusal by a quota."""
        self._quota_refusals.labels(limit).inc()

    def audit_lost(self) -> None:
        """Count a lost audit record."""
        self._audit_lost.inc()

    # --- transactions --------------------------------------------------------------------------

    def transactions_decided(self, state: str, count: int) -> None:
        """Count transactions that became committed, aborted or invalid."""
        self._decided.labels(state).inc(count)

    def transactions_timed_out(self, count: int) -> None:
        """Count transactions that timed out."""
        self._timed_out.inc(count)

    def transaction_conflicted(self) -> None:
        """Count a change set that conflicts with a committed one."""
        self._conflicts.inc()

    def transactions_crashed(self) -> None:
        """Count a fall of the transaction service."""
        self._service_crashes.inc()

    # --- actors.observe.Observer ---------------------------------------------------------------

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """Record a durable commit."""
        self._published += messages
        self._commit_requests.observe(requests)
        self._commit_messages.observe(messages)
        self._sync.observe(write_s)
        if write_s > SLOW_COMMIT_S:
            self.slow_commit = SlowCommit(write_s, perf_counter())

    def producer_events(self, counts: Mapping[str, int]) -> None:
        """Count events of producers and their requests."""
        for event, count in counts.items():
            self._producer_events.labels(event).inc(count)

    def fell(self, name: TopicName, error: BaseException) -> None:
        """Count a fall of an actor."""
        del name, error
        self._crashes.inc()

    def deposed(self, name: TopicName) -> None:
        """Count a topic that another instance has claimed."""
        del name
        self._deposed.inc()
        if self.on_deposed is not None:
            self.on_deposed()

    def handed_over(self, topics: int, seconds: float) -> None:
        """Record a handover of topics to their new owners."""
        del topics
        self._handed_over.observe(seconds)

    def loaded(self, name: TopicName, load_s: float) -> None:
        """Record the load of a topic."""
        del name
        self._load.observe(load_s)

    def cleaned(self, expired: int, purged: int) -> None:
        """Count rows that the janitor removed."""
        self._expired.inc(expired)
        self._purged.inc(purged)

    def shook_hands(self, result: str) -> None:
        """Count a completed TLS handshake."""
        self._handshakes.labels(result).inc()

    # --- scrapes -------------------------------------------------------------------------------

    def reads(self, name: str, text: str, read: Callable[[], float | None]) -> None:
        """Add a metric that is read at each scrape: a counter if its name ends in ``_total``, else a gauge.

        ``read`` may return None for unknown; that scrape then omits the metric.
        """
        self.readings.add(name, text, read)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text of a scrape and its content type: OpenMetrics if ``accept`` asks for it, else Prometheus."""
        return rendered(self.registry, accept)


#: The text format that every scraper supports.
_PLAIN_0_0_4 = "text/plain; version=0.0.4; charset=utf-8"
#: For HTTP caches, since one URL has several formats.
VARY_ACCEPT = ("Vary", "Accept")


def rendered(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the text of a registry's metrics, and its content type, the one that ``accept`` prefers."""
    offer = _best_offer(accept)
    if offer is None:
        return generate_latest(registry), _PLAIN_0_0_4
    encode, content_type = choose_encoder(offer)
    return encode(registry), content_type


def _best_offer(accept: str) -> str | None:
    """Return the best entry of ``Accept``, without its weight; None: use the plain text format 0.0.4."""
    best, best_weight = None, 0.0
    for entry in accept.split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        named = dict(part.lower().split("=", 1) for part in parameters if "=" in part)
        weight = _weight(named.pop("q", "1"))
        if kind.lower() not in ("text/plain", "application/openmetrics-text", "text/*", "*/*") or weight <= best_weight:
            continue
        is_open = kind.lower() == "application/openmetrics-text"
        version = named.get("version", "1.0.0" if is_open else "0.0.4")
        if is_open and version != "1.0.0":
            continue  # no other version is supported
        is_named = is_open or (kind.lower() == "text/plain" and version == "1.0.0")
        best_weight = weight
        best = ";".join([kind.lower(), *(f"{name}={value}" for name, value in named.items())]) if is_named else None
    return best


def _weight(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 1.0)
    except ValueError:
        return 0.0


class Readings(Collector):
    """Metrics that are read at each scrape."""

    def __init__(self, errors: Counter) -> None:
        self._errors = errors
        self._readings: list[tuple[str, str, Callable[[], float | None]]] = []

    def add(self, name: str, text: str, read: Callable[[], float | None]) -> None:
        self._readings.append((name, text, read))

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values."""
        for name, text, _ in self._readings:
            yield _family(name, text, None)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that can be read."""
        for name, text, read in self._readings:
            try:
                value = read()
            except Exception:  # one metric must not hide the others
                log.exception("a metric cannot be read")
                self._errors.inc()
                continue
            if value is not None:
                yield _family(name, text, value)


def _family(name: str, text: str, value: float | None) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, text, value=value)


# --- the hot path ----------------------------------------------------------------------------------


#
# prometheus_client takes a lock for each number and searches all buckets: 3.5 µs for an observation, of which a publish
# had two and its commit three. These cost a tenth of that, and are used only by the event loop.


class Distribution:
    """Observations in buckets."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        #: Observations between the previous bound and this one, inclusive; the last is for those above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Distributions(Collector):
    """A histogram, with a series for each value of its label, if it has one."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, label: str | None = None) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._labels = [] if label is None else [label]
        self._series: dict[str, Distribution] = {}

    def of(self, value: str = "") -> Distribution:
        """Return the series for a value of the label."""
        found = self._series.get(value)
        if found is None:
            found = self._series[value] = Distribution(self._bounds)
        return found

    def describe(self) -> Iterator[Metric]:
        """Yield the histogram without values."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Yield the current histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [floatToGoString(bound) for bound in (*self._bounds, inf)]  # type: ignore[no-untyped-call]
        for value, series in self._series.items():
            buckets = [(name, float(count)) for name, count in zip(names, accumulate(series.counts), strict=True)]
            family.add_metric([value] if self._labels else [], buckets, series.total)
        yield family


class _HotCounters(Collector):
    def __init__(self, answers: Mapping[tuple[str, int], int], published: Callable[[], int]) -> None:
        self._answers = answers
        self._published = published

    def collect(self) -> Iterator[Metric]:
        """Yield the current counters."""
        answers = CounterMetricFamily(
            "plainsong_requests_total", "Requests answered, by route and status.", labels=["route", "status"]
        )
        for (route, status), count in self._answers.items():
            answers.add_metric([route, str(status)], count)
        yield answers
        yield CounterMetricFamily("plainsong_published_messages_total", "Messages made durable.", self._published())


# --- topics ----------------------------------------------------------------------------------------


class TopicSample(NamedTuple):
    """The figures of a topic in a scrape of topics."""

    name: TopicName
    messages: int
    bytes: int
    oldest_age_s: float | None
    """None if there is no message."""
    hidden_messages: int
    published: int
    polled: int


class ReaderSample(NamedTuple):
    """The figures of a reader in a scrape of topics."""

    name: TopicName
    reader: str
    visible: int
    hidden: int
    expired_unread: int


def render_topics(topics: Sequence[TopicSample], readers: Sequence[ReaderSample], accept: str) -> tuple[bytes, str]:
    """Return the text of a scrape of topics, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TopicSamples(topics, readers))
    return rendered(registry, accept)


#: Metric → its help text, and the field with its value.
_OF_TOPICS = {
    "messages": ("Messages that have not expired.", "messages"),
    "bytes": ("Bytes of messages that have not expired, as GET …/stats counts them.", "bytes"),
    "oldest_age_seconds": ("Age of the oldest message.", "oldest_age_s"),
    "hidden_messages": ("Messages that undecided transactions hide from committed readers.", "hidden_messages"),
    "published_total": ("Messages published here since the start.", "published"),
    "polled_total": ("Messages read here since the start.", "polled"),
}
_OF_READERS = {
    "visible_messages": ("Messages that the reader can read now, as a committed reader.", "visible"),
    "hidden_messages": ("Messages ahead of the reader that undecided transactions hide.", "hidden"),
    "expired_unread_messages": (
        "Messages that expired before the reader read them, as far as they are still stored.",
        "expired_unread",
    ),
}


class TopicSamples(Collector):
    """Metrics of topics and readers. Clients choose these labels, so the caller must bound their number."""

    def __init__(self, topics: Sequence[TopicSample], readers: Sequence[ReaderSample]) -> None:
        self._topics = topics
        self._readers = readers

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        for what, (text, field_name) in _OF_TOPICS.items():
            kind = CounterMetricFamily if what.endswith("_total") else GaugeMetricFamily
            family = kind(f"plainsong_topic_{what}", text, labels=["namespace", "topic"])
            for topic in self._topics:
                if (value := getattr(topic, field_name)) is not None:
                    family.add_metric([*topic.name], value)
            yield family
        for what, (text, field_name) in _OF_READERS.items():
            family = GaugeMetricFamily(f"plainsong_reader_{what}", text, labels=["namespace", "topic", "reader"])
            for reader in self._readers:
                family.add_metric([*reader.name, reader.reader], getattr(reader, field_name))
            yield family


# --- transactions ----------------------------------------------------------------------------------


class Decisions:
    """Implements ``actors.observe.TransactionObserver``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def decided(self, state: State, count: int) -> None:
        self._metrics.transactions_decided(state, count)

    def conflicted(self) -> None:
        """Count a change set that conflicts with a committed one."""
        self._metrics.transaction_conflicted()

    def timed_out(self, count: int) -> None:
        self._metrics.transactions_timed_out(count)

    def fell(self, error: BaseException) -> None:
        del error
        self._metrics.transactions_crashed()

    def loaded(self, load_s: float) -> None:
        del load_s


# --- rates -----------------------------------------------------------------------------------------
#
# Messages, and their bytes, published to and read from each topic: per second over about the last minute, and in each
# of the last 60 minutes. The rate uses the count of the current minute, and the share of the previous minute that is
# less than a minute old. Topics idle for longest are evicted first.


WINDOW_S = 60.0
#: Minutes whose counts are kept, including the current one.
MINUTES = 60
#: Topics whose rates are kept, in each direction.
MAX_TOPICS = 10_000
#: Polls whose delays are kept, for each topic.
MAX_DELAYS = 256


class Minute(NamedTuple):
    """The traffic of a topic in one minute."""

    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Window:
    number: int
    count: int = 0
    size: int = 0
    past: array[int] = field(default_factory=partial(array, "Q"))
    """Messages and bytes of earlier minutes, alternating, oldest first; minutes before the first had none."""
    counted: int = 0
    """Messages of all earlier minutes."""

    def move_to(self, number: int) -> None:
        self.counted += self.count
        past = self.past
        if self.count or past:
            past.extend((self.count, self.size))
            past.extend((0, 0) * min(number - self.number - 1, MINUTES))
            del past[: 2 - 2 * MINUTES]
        self.count = self.size = 0
        self.number = number


class Rate:
    """A rate for each topic."""

    def __init__(self, max_topics: int = MAX_TOPICS) -> None:
        self._max_topics = max_topics
        self._windows: OrderedDict[TopicName, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, name: TopicName, count: int, now_s: float, size: int = 0) -> None:
        """Add ``count`` messages of ``size`` bytes at ``now_s`` on a monotonic clock."""
        number = int(now_s // WINDOW_S)
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(number)
            if len(self._windows) > self._max_topics:
                self._windows.popitem(last=False)
        elif window.number != number:
            window.move_to(number)
            self._windows.move_to_end(name)
        window.count += count
        window.size += size

    def per_second(self, name: TopicName, now_s: float) -> float:
        """Return the rate over about the last minute; 0 for an evicted topic."""
        window = self._now(name, now_s)
        if window is None:
            return 0.0
        passed = now_s % WINDOW_S / WINDOW_S
        before = window.past[-2] if window.past else 0
        return (window.count + before * (1 - passed)) / WINDOW_S

    def total(self, name: TopicName) -> int:
        """Return the number of messages since the start, or since the topic was evicted."""
        window = self._windows.get(name)
        return 0 if window is None else window.counted + window.count

    def history(self, name: TopicName, now_s: float) -> list[Minute]:
        """Return the last ``MINUTES`` minutes, oldest first; the last one is the current, incomplete minute."""
        window = self._now(name, now_s)
        if window is None:
            return [Minute()] * MINUTES
        past = window.past
        known = [*map(Minute, past[::2], past[1::2]), Minute(window.count, window.size)]
        return [Minute()] * (MINUTES - len(known)) + known

    def _now(self, name: TopicName, now_s: float) -> _Window | None:
        window = self._windows.get(name)
        number = int(now_s // WINDOW_S)
        if window is not None and window.number != number:
            if window.count:  # `add` marks a topic as used only where it moves the window, which it need not do now
                self._windows.move_to_end(name)
            window.move_to(number)
        return window


class Delays(NamedTuple):
    """The median and the 99th percentile of delays, in milliseconds; None if there are none."""

    p50_ms: int | None = None
    p99_ms: int | None = None


class LastDelays:
    """The last ``MAX_DELAYS`` delays of each topic."""

    def __init__(self, max_topics: int = MAX_TOPICS) -> None:
        self._max_topics = max_topics
        self._last: OrderedDict[TopicName, array[int]] = OrderedDict()
        """By topic: the number of delays so far, then a ring buffer of the delays."""

    def __len__(self) -> int:
        return len(self._last)

    def add(self, name: TopicName, delay_ms: int) -> None:
        """Add a delay; evicts the topic's oldest one, or the topic whose last delay is oldest."""
        last = self._last.get(name)
        if last is None:
            last = self._last[name] = array("Q", (0,))
            if len(self._last) > self._max_topics:
                self._last.popitem(last=False)
        else:
            self._last.move_to_end(name)
        if len(last) <= MAX_DELAYS:
            last.append(delay_ms)
        else:
            last[1 + last[0] % MAX_DELAYS] = delay_ms
        last[0] += 1

    def of(self, name: TopicName) -> Delays:
        """Return the topic's percentiles, each one of its delays (nearest rank)."""
        last = sorted(self._last.get(name, ())[1:])
        if not last:
            return Delays()
        return Delays(*(last[-(-len(last) * percent // 100) - 1] for percent in (50, 99)))


class Rates:
    """The rates of all topics, in both directions, and their delivery delays."""

    def __init__(self) -> None:
        #: Durable messages; sizes are bytes of payload.
        self.publishing = Rate()
        self.polling = Rate()
        self.delivery = LastDelays()
        """Times from publish to delivery, for polls that waited."""

    def delivered(self, name: TopicName, messages: int, now_s: float) -> None:
        """Count messages that were read for a client."""
        if messages:
            self.polling.add(name, messages, now_s)
