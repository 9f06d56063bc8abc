"""The addresses on which the daemon may listen, and the clients that can reach it there."""

from __future__ import annotations

import pytest

from broker.config import Config, ConfigError, load_config
from broker.config.values import Address, UnixPath, is_loopback, parse_bind


def test_several_addresses_can_be_listened_on():
    http = load_config(None, {}, {"http.bind": " unix:/run/a b.sock , [::1]:1,127.0.0.1:2"}).config.http
    assert http.binds == [UnixPath("/run/a b.sock"), Address("::1", 1), Address("127.0.0.1", 2)]
    assert http.bind == "unix:/run/a b.sock,[::1]:1,127.0.0.1:2"
    assert http.address == Address("::1", 1)
    assert Config().http.binds == [Address("127.0.0.1", 7420)]
    assert load_config(None, {}, {"http.bind": "unix:/a"}).config.http.address is None


@pytest.mark.parametrize(
    "bind",
    [
        "",
        ",",
        "127.0.0.1:1,",
        "unix:",
        "unix:relative.sock",
        "unix:/run/",
        "unix:/" + "x" * 107,
        "nobody",
        "127.0.0.1:1,127.0.0.1:1",
        "unix:/a,unix:/a",
        "http://127.0.0.1:1",
    ],
)
def test_an_invalid_address_is_refused(bind):
    with pytest.raises(ConfigError):
        load_config(None, {}, {"http.bind": bind})


@pytest.mark.parametrize("mode", ["0660", "600", "0777"])
def test_a_mode_is_written_in_octal_digits(mode):
    assert load_config(None, {}, {"http.unix_mode": mode}).config.http.unix_mode == mode


@pytest.mark.parametrize("mode", ["", "0888", "rw-rw----", "07777", "66"])
def test_an_invalid_mode_is_refused(mode):
    with pytest.raises(ConfigError):
        load_config(None, {}, {"http.unix_mode": mode})


@pytest.mark.parametrize("bind", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "LocalHost.:1", "unix:/a"])
def test_loopback_is_reachable_from_this_machine_only(bind):
    assert is_loopback(parse_bind(bind))


@pytest.mark.parametrize("bind", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "queue.example:1", "128.0.0.1:1", "*:1"])
def test_everything_else_can_be_reached_from_other_machines(bind):
    assert not is_loopback(parse_bind(bind))
