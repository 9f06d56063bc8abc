"""What looks like a credential is written without what makes it one, wherever something is logged or answered."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"psg_[0-9A-Za-z]+")
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?")
#: One that is whole enough to be used, or to be completed.
_WHOLE = re.compile(r"psg_[0-9A-Za-z]{40}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.")
#: The user, and maybe a password, in a URL.
_USER = re.compile(r"(?<=://)[^/?#@\s\"'<>]+(?=@)")


def masked(text: str) -> str:
    """``text`` with ``psg_***`` and ``eyJ***`` for what looks like a token of ours or a JSON Web Token.

    Users in URLs, which may have passwords, become ``***``.
    """
    if "psg_" in text:
        text = _TOKEN.sub("psg_***", text)
    if "eyJ" in text:
        text = _JWT.sub("eyJ***", text)
    if "://" in text and "@" in text:
        text = _USER.sub("***", text)
    return text


def holds_credential(text: str) -> bool:
    """Whether a part of ``text`` is a token, as far as its form says: it would be shown wherever the text is."""
    return ("psg_" in text or "eyJ" in text) and _WHOLE.search(text) is not None
