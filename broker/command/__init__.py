"""The daemon's own commands; the command line finds them by their entry points."""

from __future__ import annotations
