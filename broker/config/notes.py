"""What settings come to that are allowed, and most likely not what was meant: told by ``config check``, refused nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.config.config import every_setting
from broker.config.values import parse_address, show_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from broker.config.config import Config

_LOOPBACK = ("127.", "localhost", "::1")


def notes(config: Config) -> list[str]:
    """Sentences about such settings; none when there is nothing to say."""
    return [*_idle(config), *(_together(config) if config.cluster.zookeeper else _alone(config))]


def _idle(config: Config) -> Iterator[str]:
    """Settings that were changed and have no effect."""
    for name, setting in every_setting().items():
        if config.value(name) == setting.default:
            continue
        if name.startswith("storage.hbase.") and config.storage.kind != "hbase":
            yield f"{_shown(config, name)} has no effect while {_shown(config, 'storage.kind')}"
        if name.startswith("cluster.") and not config.cluster.zookeeper:
            yield f"{_shown(config, name)} has no effect without cluster.zookeeper"


def _alone(config: Config) -> Iterator[str]:
    if config.storage.kind == "hbase":
        yield (
            "without cluster.zookeeper this instance takes itself for the only one on its tables: "
            "another daemon on them would take its topics, and have them taken, again and again"
        )


def _together(config: Config) -> Iterator[str]:
    name = "cluster.advertise" if config.cluster.advertise else "http.bind"
    address = parse_address(config.value(name))
    if address.host.startswith(_LOOPBACK):
        yield f"{_shown(config, name)}: only instances on this machine can reach this one; cluster.advertise says where"
    if not config.cluster.instance and address.port == 0:
        yield "cluster.instance is empty and the port any free one: this instance has another name after each start"


def _shown(config: Config, name: str) -> str:
    return f"{name} = {show_value(every_setting()[name].meaning, config.value(name))}"
