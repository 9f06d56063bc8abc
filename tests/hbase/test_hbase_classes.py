"""The JVMs of these tests load their classes from an archive; a JVM silently ignores an unsuitable archive."""

from __future__ import annotations

from pathlib import Path

from tests.hbase_classes import folder


def test_the_jvms_of_hbase_and_of_its_gateway_map_the_archives_of_their_classes(hbase):
    for name in ("hbase", "thrift"):
        mapped = Path(f"/proc/{hbase.processes[name].pid}/maps").read_text()
        assert f"{folder()}/{name}.jsa" in mapped
