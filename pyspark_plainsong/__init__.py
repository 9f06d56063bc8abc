"""Plainsong's topics as tables and streams of Spark, which finds the data source by this package's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_plainsong.source import DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    # Lazy: the command line lists the pipeline's jobs from this package, and must not need or load pyspark.
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_plainsong.source import DefaultSource

    return DefaultSource
