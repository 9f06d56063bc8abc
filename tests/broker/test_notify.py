"""The notifications to systemd, over a real socket; a missing socket is not an error."""

from __future__ import annotations

import os
import socket

import pytest

from broker.systemd import Notifier
from tests.patience import PATIENCE_S


@pytest.fixture(params=["file", "abstract"])
def systemd(request, tmp_path):
    name = str(tmp_path / "notify") if request.param == "file" else f"\0plainsong-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name)
        end.settimeout(PATIENCE_S)
        yield end, name.replace("\0", "@")


def test_systemd_is_notified_of_ready_alive_and_stopping(systemd):
    end, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready()
    notifier.alive()
    notifier.stopping()
    assert [end.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/at/all"}, {"NOTIFY_SOCKET": "vsock:2"}]
)
def test_a_missing_listener_is_ignored(environ):
    Notifier(environ).ready()


def test_a_listener_that_does_not_read_blocks_nothing(systemd):
    _, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    for _ in range(2000):
        notifier.alive()


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_interval(environ, interval_s):
    assert Notifier({"NOTIFY_SOCKET": "@x", **environ}).watchdog_interval_s == interval_s


def test_no_socket_means_no_watchdog():
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_interval_s is None
