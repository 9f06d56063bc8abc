"""Calls in threads when the system refuses to start threads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Runs as a user without other processes, because the limit on threads is per user.
CHILD = """
import os, resource, sys, threading
import trio
from storage.threaded import NoThread, in_thread

if os.geteuid() == 0:
    os.setgid(64_322)
    os.setuid(64_322)
_, most = resource.getrlimit(resource.RLIMIT_NPROC)

def allow(threads):
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, most))

def failing():
    calls.append("failing")
    raise RuntimeError("can't start new thread")

calls = []

async def main():
    allow(1)
    try:
        await in_thread(calls.append, "never", max_wait_s=0)
    except NoThread as error:
        print(error.code, error.outcome, error.detail, error.hint, sep="|")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, calls.append, "later")
        await trio.testing.wait_all_tasks_blocked()
        assert not calls
        allow(most)
    try:
        await in_thread(failing)
    except RuntimeError as error:
        calls.append(type(error).__name__)
    print(*calls)

import trio.testing
trio.run(main)
"""


def test_a_call_waits_until_the_system_allows_a_thread_and_fails_with_a_hint_if_it_does_not():
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=False)
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("NOT TESTED: a limit on threads, since another user cannot run this program")
    assert done.returncode == 0, done.stderr
    refused, calls = done.stdout.splitlines()
    assert refused.startswith("overloaded|not-applied|the daemon has reached its limit on threads|raise the limit")
    assert calls.split() == ["later", "failing", "RuntimeError"], "a call that has begun is not repeated"


@pytest.mark.parametrize("floor", ["storage", "actors", "broker"])
def test_every_call_in_a_thread_goes_through_the_function_that_waits_for_one(floor):
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / floor).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "trio.to_thread.run_sync"
    ]
    assert found == ["storage/threaded.py"] * (floor == "storage")
