"""The contact for security reports: the file of RFC 9116."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from broker.config import ConfigError, load_config
from tests.broker.broker_in_process import in_process
from tests.security.named import named

PATH = "/.well-known/security.txt"


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_the_security_contact_is_shown_without_authentication(tmp_path, listener):
    contact = "mailto:security@example.org, https://example.org/report"
    async with named(tmp_path, listener=listener, security__contact=contact) as daemon:
        answer = await daemon.ask(None, "GET", PATH)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        *contacts, expires = answer.text.splitlines()
        assert contacts == ["Contact: mailto:security@example.org", "Contact: https://example.org/report"]
        ends = datetime.fromisoformat(expires.removeprefix("Expires: "))
        now = datetime.fromtimestamp(daemon.daemon.clock.ms / 1000, UTC)
        assert timedelta(days=1) < ends - now < timedelta(days=365)


async def test_without_the_setting_there_is_no_such_file():
    async with in_process() as daemon:
        await daemon.call("GET", PATH, status=404, code="not_found")


@pytest.mark.parametrize(
    "contact", ["security@example.org", "http://example.org", "mailto:a@b\nExpires: 9", "mailto:,"]
)
def test_an_invalid_contact_is_refused_at_the_start(contact):
    with pytest.raises(ConfigError, match=r"security\.contact"):
        load_config(None, {}, {"security.contact": contact})
