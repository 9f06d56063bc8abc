"""Freed memory is kept for reuse, within bounds, unless the environment says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

#: Frees the memory of a page of 10 000 messages a hundred times; prints whether the reuse was set up, and the pages
#: mapped.
PAGES = """
import resource
from broker.freed_memory import bound_freed_memory
print(bound_freed_memory())
def page():
    parts = [bytes([n]) * 60_000 for n in range(20)]
    return len(b"".join(parts))
for _ in range(5):
    page()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    page()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
#: Frees more memory than is kept, and prints how much of it the process still holds.
BOUNDED = """
from broker.freed_memory import KEPT_BYTES, MAPPED_BYTES, bound_freed_memory
bound_freed_memory()
def own_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
before = own_bytes()
for size in (60_000, MAPPED_BYTES + 1):
    blocks = [b"x" * size for _ in range((256 << 20) // size)]
    most = own_bytes() - before
    del blocks
    print(most > 200 << 20, own_bytes() - before < KEPT_BYTES + (1 << 20))
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")


def said(program: str, **environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=clean | environment, check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.stdout.split()


@glibc
def test_memory_freed_by_a_page_is_reused_by_the_next_one():
    is_set, mapped = said(PAGES)
    assert is_set == "True"
    assert int(mapped) < 500  # five per page; without the reuse, more than three hundred


@glibc
def test_memory_beyond_the_bound_is_returned_to_the_system():
    assert said(BOUNDED) == ["True"] * 4


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_operator_are_left_alone(variable):
    value = "glibc.malloc.trim_threshold=131072" if variable == "GLIBC_TUNABLES" else "131072"
    assert said(PAGES, **{variable: value})[0] == "False"
