"""Unix socket files: a daemon removes its own."""

from __future__ import annotations

import os
import socket

import pytest

from broker.http.sockets import SocketFiles


@pytest.mark.parametrize("changed", [None, "st_ino", "st_dev"])
def test_a_socket_file_is_removed_only_if_device_and_inode_are_our_own(tmp_path, monkeypatch, changed):
    path, real = tmp_path / "socket", os.lstat
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        files = SocketFiles([listener])

        def lstat(asked):
            fields = list(real(asked))
            if changed is not None:
                fields[1 if changed == "st_ino" else 2] += 1
            return os.stat_result(fields)

        with monkeypatch.context() as patched:
            patched.setattr(os, "lstat", lstat)
            files.remove()
    assert path.exists() is (changed is not None)
