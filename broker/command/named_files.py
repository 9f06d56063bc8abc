"""Reads the files named in the settings, as ``plainsong serve`` does before it opens anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.security.files import FileUnusable, read_guarded, reason_of
from broker.security.guard import Guard
from broker.security.reload import SecurityFiles
from broker.tls import certificates_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from broker.config import Config


def problems_of_files(config: Config) -> list[str]:
    """Return the reason for each file named in the settings that would keep the daemon from starting."""
    return [why for read in _reads(config) if (why := _problem_of(read)) is not None]


def notes_of_files(config: Config) -> list[str]:
    """Return warnings about missing files that the daemon can start without, but most likely needs."""
    jwks = config.security.oidc.jwks
    if not jwks or jwks.startswith(("https://", "http://")):
        return []
    try:
        read_guarded(Path(jwks), 1 << 20)
    except OSError as error:
        return [f"security.oidc.jwks: {reason_of(error, jwks)}: requests with tokens of the provider get 503"]
    return []


def _reads(config: Config) -> Iterator[Callable[[], object]]:
    from broker.api.topics.chain import chain_secrets
    from broker.link.proof import link_secret

    security = config.security
    guard = Guard(required=security.authentication == "required")
    # Read each on its own, so that the first unusable file does not hide the others.
    yield SecurityFiles(replace(security, grants_file=""), guard).load
    yield SecurityFiles(replace(security, tokens_file=""), guard).load
    yield lambda: certificates_of(config)
    yield lambda: link_secret(config, "")
    yield lambda: chain_secrets(config)
    if config.cluster.zookeeper:
        from broker.membership.zookeeper import access_of

        yield lambda: access_of(config.cluster)
    if config.storage.kind == "hbase":
        from broker.stores import hbase_tls

        yield lambda: hbase_tls(config.storage.hbase)


def _problem_of(read: Callable[[], object]) -> str | None:
    try:
        read()
    except FileUnusable as error:
        return str(error)
    return None
