"""What looks like a credential is written without what makes it one, wherever something is logged or answered."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"psg_[0-9A-Za-z]+")
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?")


def masked(text: str) -> str:
    """``text`` with ``psg_***`` and ``eyJ***`` for what looks like a token of ours or a JSON Web Token."""
    if "psg_" in text:
        text = _TOKEN.sub("psg_***", text)
    if "eyJ" in text:
        text = _JWT.sub("eyJ***", text)
    return text
