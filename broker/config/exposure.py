"""Refuses a daemon that strangers could reach: an address that other machines reach needs authentication and TLS.

``security.allow_insecure`` names the protections that the operator waives; nothing else lets such a daemon start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.config.values import is_loopback, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from broker.config import Config

#: Protections that can be waived, in the order in which messages name them.
WAIVABLE = ("authentication", "tls", "thrift", "peers")


@dataclass(frozen=True, slots=True)
class Exposure:
    """A reason why a daemon with these settings does not start, and how to remove it."""

    detail: str
    hint: str


def refusals(config: Config) -> list[Exposure]:
    """Return the reasons why a daemon with these settings may not start; empty if it may."""
    return [*_http(config), *_thrift(config), *_peers(config)]


def in_effect(config: Config) -> dict[str, str]:
    """Return each word of ``security.allow_insecure`` that makes a difference, with its consequence."""
    waived = waived_words(config)
    missing = {word for word in _missing(config) if _reachable(config)}
    if config.transactions.thrift and not is_loopback(parse_address(config.transactions.thrift)):
        missing |= {"thrift"} if not _thrift_is_guarded(config) else set()
    missing |= {"peers"} if _peers_are_unproven(config) else set()
    says = {
        "authentication": "reachable without authentication",
        "tls": "reachable without TLS",
        "thrift": f"reachable without a certificate: Thrift at {config.transactions.thrift}",
        "peers": "reachable without a secret: links of other instances",
    }
    return {word: says[word] for word in WAIVABLE if word in waived & missing}


def waived_words(config: Config) -> set[str]:
    """Return the words of ``security.allow_insecure``."""
    return {word.strip() for word in config.security.allow_insecure.split(",")} - {""}


def _missing(config: Config) -> list[str]:
    required = config.security.authentication == "required"
    return [*([] if required else ["authentication"]), *([] if config.tls.certificate else ["tls"])]


def _reachable(config: Config) -> list[str]:
    return [str(bind) for bind in config.http.binds if not is_loopback(bind)]


def _http(config: Config) -> Iterator[Exposure]:
    binds, waived = _reachable(config), waived_words(config)
    missing = [word for word in _missing(config) if word not in waived]
    if not binds or not missing:
        return
    lacks = {"authentication": "without authentication", "tls": "without TLS"}
    mends = {
        "authentication": 'set security.authentication = "required" (plainsong token create makes the first token)',
        "tls": "set tls.certificate and tls.key",
    }
    where = f'http.bind = "{",".join(binds)}" can be reached from other machines '
    mending = "; ".join(mends[word] for word in missing)
    yield Exposure(where + " and ".join(lacks[word] for word in missing), f"{mending}; {_or_say(waived, missing)}")


def _thrift(config: Config) -> Iterator[Exposure]:
    bind = config.transactions.thrift
    if not bind or is_loopback(parse_address(bind)) or _thrift_is_guarded(config) or "thrift" in waived_words(config):
        return
    lacks = [
        *([] if config.tls.client_certificates == "required" else ["without authentication"]),
        *([] if config.transactions.thrift_tls else ["without TLS"]),
    ]
    yield Exposure(
        f'transactions.thrift = "{bind}" can be reached from other machines ' + " and ".join(lacks),
        'set transactions.thrift_tls = true and tls.client_certificates = "required"; '
        + _or_say(waived_words(config), ["thrift"]),
    )


def _thrift_is_guarded(config: Config) -> bool:
    return config.transactions.thrift_tls and config.tls.client_certificates == "required"


def _peers(config: Config) -> Iterator[Exposure]:
    if _peers_are_unproven(config) and "peers" not in waived_words(config):
        yield Exposure(
            'security.authentication = "required" and cluster.zookeeper without cluster.secret_file: any client '
            "could pose as another instance",
            f"set cluster.secret_file to the same secret on all instances; {_or_say(waived_words(config), ['peers'])}",
        )


def _peers_are_unproven(config: Config) -> bool:
    required = config.security.authentication == "required"
    return required and bool(config.cluster.zookeeper) and not config.cluster.secret_file


def _or_say(waived: set[str], missing: list[str]) -> str:
    words = ",".join(word for word in WAIVABLE if word in waived or word in missing)
    return f'or accept the risk: security.allow_insecure = "{words}"'
