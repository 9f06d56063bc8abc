"""The job `archive`: keeps topics as Delta tables beyond their expiry, each message once; ``read`` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_plainsong.pipeline.archive.reading import read

__all__ = ["read"]


def __getattr__(name: str) -> Any:
    # Loaded at its first use: the help of the command needs no pyspark.
    if name == "read":
        from pyspark_plainsong.pipeline.archive.reading import read

        return read
    raise AttributeError(name)
