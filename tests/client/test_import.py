"""``import plainsong`` loads only what a first request needs, so that programs start fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Modules that were once part of the import; each takes up to tens of milliseconds, so only its users load it.
LATER = {
    "anyio",
    "difflib",
    "fastavro",
    "hashlib",
    "httpcore2",
    "msgspec",
    "opentelemetry",
    "plainsong._async",
    "plainsong._sync.events",
    "plainsong._sync.stream",
    "plainsong.chains",
    "plainsong.cli",
    "plainsong.protocol.cluster",
    "plainsong.protocol.codec.cloud_events",
    "plainsong.protocol.tephra",
    "plainsong.protocol.topic",
    "plainsong.sql",
    "plainsong.testing",
    "plainsong.transport.async_http",
    "plainsong.transport.event_source",
    "plainsong.transport.websocket",
    "platform",
    "sqlalchemy",
    "trio",
    "uuid",
    "wsproto",
}
USES = {
    "import plainsong": "import plainsong",
    "plainsong.Client": "import plainsong; plainsong.Client",
    "a client that is made": "import plainsong; plainsong.Client('http://127.0.0.1:9').close()",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_client_for_threads_loads_only_what_a_first_request_needs(use):
    # Some environments load standard library modules before any program; these do not count.
    code = f"import sys; before = set(sys.modules); {use}; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "plainsong" in loaded
    assert LATER.isdisjoint(loaded), sorted(LATER.intersection(loaded))
