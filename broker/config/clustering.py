"""The settings of a cluster: several instances that share one store, and who of them owns what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from broker.config.meaning import count, optional_address, seconds, text
from broker.config.values import parse_address

if TYPE_CHECKING:
    from broker.config.values import Address

#: Where the nodes are, below the ensemble's root, when ``cluster.zookeeper`` names no path.
DEFAULT_PATH = "/plainsong"

#: What it takes, once the session of an owner that died is over, until the next one is found and has answered: a topic
#: is served within two seconds.
TAKE_OVER_S = 3.0

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several instances as one service, by way of ZooKeeper."""

    zookeeper: str = text(
        "",
        "The ensemble by which instances find each other, as host:port[,host:port...][/path], by default at "
        "/plainsong; empty: this instance is alone and owns everything. It needs storage.kind = hbase.",
        pattern=rf"(?:{_HOST}(?:,{_HOST})*(?:/[\w./-]*)?)?",
        expected='text like "zk1:2181,zk2:2181,zk3:2181/plainsong"',
    )
    instance: str = text(
        "",
        "What this instance is called among the others, the same after a restart; empty: the host's name and the port.",
        pattern=r"[\w.-]{0,100}",
        expected="up to 100 letters, digits, _, - and .",
    )
    advertise: str = optional_address(
        "Where clients and other instances reach this one; empty: http.bind, when that is the address of one machine."
    )
    session_timeout_s: float = seconds(
        10.0,
        "How long an instance may be silent before its topics go to the others; ZooKeeper has bounds of its own, of 2 "
        "and 20 ticks.",
        small="a short pause of an instance, or of ZooKeeper, moves its topics",
        large="topics of an instance that died are served by nobody for as long",
        low=1.0,
        high=600.0,
    )
    weight: int = count(
        100,
        "This instance's share of the topics, as compared to the others'.",
        small="the others own more",
        large="this one owns more than it can serve",
        high=1_000_000,
    )

    @property
    def take_over_s(self) -> float:
        """How long topics of an instance that died may be without an answer; 0: there are no others to answer."""
        return self.session_timeout_s + TAKE_OVER_S if self.zookeeper else 0.0


class Ensemble(NamedTuple):
    """What ``cluster.zookeeper`` says."""

    hosts: str
    """``host:port``, parted by commas."""
    path: str
    """Where the nodes are: begins with a slash and does not end with one."""


def parse_ensemble(said: str) -> Ensemble:
    """The parts of ``cluster.zookeeper``. Raises ValueError where an address is none."""
    hosts, slash, path = said.partition("/")
    for host in hosts.split(","):
        parse_address(host)
    steps = [step for step in path.split("/") if step]
    if any(step in (".", "..") for step in steps):
        raise ValueError(f"{slash}{path} is no path of ZooKeeper")
    return Ensemble(hosts, "/" + "/".join(steps) if steps else DEFAULT_PATH)


def is_wildcard(address: Address) -> bool:
    """Whether a host stands for all addresses of a machine, so that nobody elsewhere can go there."""
    return address.host in ("0.0.0.0", "::", "*")  # noqa: S104 - told apart, not listened on
