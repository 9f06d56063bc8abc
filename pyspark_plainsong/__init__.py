"""Plainsong's topics as Spark's tables and streams; Spark finds the data source ``plainsong`` by this package's name."""

from __future__ import annotations

from pyspark_plainsong.source import DefaultSource

__all__ = ["DefaultSource"]
