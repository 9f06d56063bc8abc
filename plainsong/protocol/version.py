"""The version of the program, the same in all its distributions."""

from __future__ import annotations

VERSION = "0.2.0"
