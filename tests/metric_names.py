"""Every metric's name and kind, as in a scrape, for comparison with documents, alerts and the dashboard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from broker.gauges import (
    add_cluster_gauges,
    add_event_gauges,
    add_gauges,
    add_keeping_gauges,
    add_link_gauges,
    add_security_gauges,
    add_tls_gauges,
    add_transaction_gauges,
)
from broker.metrics import Metrics, TopicSamples
from broker.replication import add_copy_gauges
from broker.standby import add_standby_gauges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric


def metrics_of_the_daemon() -> dict[str, str]:
    """Return the metrics of ``/metrics``."""
    metrics = Metrics("0")
    nothing: Any = SimpleNamespace(budget=SimpleNamespace(), answers=SimpleNamespace(), puts=SimpleNamespace())
    add_gauges(metrics, nothing, nothing, nothing, nothing, nothing, nothing)
    add_transaction_gauges(metrics, nothing, nothing, nothing, nothing)
    add_cluster_gauges(metrics, nothing)
    add_link_gauges(metrics, nothing)
    add_event_gauges(metrics, nothing)
    add_keeping_gauges(metrics, nothing, nothing)
    add_security_gauges(metrics, nothing)
    add_tls_gauges(metrics, nothing)
    add_copy_gauges(metrics, nothing, nothing)
    standby = Metrics("0")
    add_standby_gauges(standby, nothing)
    metrics.registry.unregister(metrics.readings)
    return _kinds((*metrics.registry.collect(), *metrics.readings.describe(), *standby.readings.describe()))


def metrics_of_topics() -> dict[str, str]:
    """Return the metrics of ``/metrics/topics``."""
    return _kinds(TopicSamples([], []).collect())


def _kinds(families: Iterable[Metric]) -> dict[str, str]:
    return {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}
