"""What settings must be to each other: values that are fine alone, and could not work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.config.clustering import TAKE_OVER_S, is_wildcard, parse_ensemble
from broker.config.config import every_setting
from broker.config.problems import Problem
from broker.config.values import parse_address, show_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.config.config import Config

#: The first must be at least so many times the third, else what the fourth says.
_AT_LEAST = (
    # A compressed body is held beside what it decompresses to.
    ("http.max_inflight_bytes", 2, "http.max_body_bytes", "the largest body allowed would never be taken"),
    # A page is held beside what it is encoded to, and a part of the room is for small answers.
    ("http.max_answer_bytes", 3, "topic.max_message_bytes", "the largest message allowed could hardly ever be read"),
    ("http.max_body_bytes", 1, "topic.max_message_bytes", "the largest message allowed would fit into no body"),
    ("topic.mailbox_bytes", 1, "http.max_body_bytes", "the largest body allowed would fit into no mailbox"),
    (
        "deduplication.max_retention_s",
        1,
        "deduplication.producer_retention_s",
        "the default memory would not be allowed",
    ),
    (
        "deduplication.max_producers",
        1,
        "deduplication.max_long_producers",
        "those with a long memory are among the others, and nothing could take their place",
    ),
    ("transactions.max_timeout_s", 1, "transactions.timeout_s", "the default time-out would not be allowed"),
)


def check_together(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Every pair of settings that cannot work together."""
    return _too_small(config, origins) + _whose_service(config, origins) + _in_a_cluster(config, origins)


def _too_soon(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Decisions that give up before topics of an instance that died have another owner; where nothing is said, longer."""
    least_s = config.cluster.take_over_s
    return [
        Problem(
            _both(origins[name], origins["cluster.session_timeout_s"]),
            f"{_shown(config, name)} is less than {_shown(config, 'cluster.session_timeout_s')} and {TAKE_OVER_S:g} s",
            f"at least {least_s:g}, or leave it out: topics of an instance that died have no owner before",
        )
        for name in ("transactions.commit_deadline_s", "transactions.abort_deadline_s")
        if config.transactions.service == "embedded" and origins[name] != "default" and config.value(name) < least_s
    ]


def _too_small(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(_both(origins[larger], origins[smaller]), _is_less(config, larger, times, smaller), why)
        for larger, times, smaller, why in _AT_LEAST
        if config.value(larger) < times * config.value(smaller)
    ]


def _whose_service(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """A Tephra's address belongs to one choice of the service, a port for Tephra's clients to another."""
    chosen = config.transactions
    service = "transactions.service"
    found: list[Problem] = []
    if chosen.service == "tephra" and not chosen.tephra:
        found.append(
            Problem(origins[service], f"{_shown(config, service)} without transactions.tephra", "say where it is")
        )
    for name, needs in (("transactions.tephra", "tephra"), ("transactions.thrift", "embedded")):
        if config.value(name) and chosen.service != needs:
            what = f'{_shown(config, name)} needs transactions.service = "{needs}"'
            found.append(Problem(_both(origins[name], origins[service]), what, "remove it, or change the service"))
    return found


def _in_a_cluster(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Several instances need a store that all of them reach, and have to reach each other."""
    cluster, origin = config.cluster, origins["cluster.zookeeper"]
    if not cluster.zookeeper:
        return []
    found: list[Problem] = []
    try:
        parse_ensemble(cluster.zookeeper)
    except ValueError as error:
        found.append(Problem(origin, f"cluster.zookeeper: {error}"))
    if config.storage.kind != "hbase":
        kind = _shown(config, "storage.kind")
        found.append(
            Problem(
                _both(origin, origins["storage.kind"]),
                f'cluster.zookeeper needs storage.kind = "hbase", and {kind}',
                "leave it empty for an instance that is alone",
            )
        )
    found += _too_soon(config, origins)
    name = "cluster.advertise" if cluster.advertise else "http.bind"
    address = parse_address(config.value(name))
    if is_wildcard(address) or (cluster.advertise and address.port == 0):
        what = f"{_shown(config, name)} is no address that other instances and clients could go to"
        found.append(Problem(_both(origin, origins[name]), what, "say in cluster.advertise where this one is"))
    return found


def _is_less(config: Config, larger: str, times: int, smaller: str) -> str:
    least = "" if times == 1 else f"{times} times "
    return f"{_shown(config, larger)} is less than {least}{_shown(config, smaller)}"


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}, {second}"


def _shown(config: Config, name: str) -> str:
    return f"{name} = {show_value(every_setting()[name].meaning, config.value(name))}"
