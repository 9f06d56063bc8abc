"""Masks credentials in everything that is logged or sent in a response."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"psg_[0-9A-Za-z]+")
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?")
#: A credential complete enough to be used, or to be completed.
_WHOLE = re.compile(r"psg_[0-9A-Za-z]{40}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.")
#: The user in a URL, with the password if there is one.
_USER = re.compile(r"(?<=://)[^/?#@\s\"'<>]+(?=@)")


def masked(text: str) -> str:
    """Return the text with ``psg_***`` for tokens, ``eyJ***`` for JSON Web Tokens, and ``***`` for users in URLs."""
    if "psg_" in text:
        text = _TOKEN.sub("psg_***", text)
    if "eyJ" in text:
        text = _JWT.sub("eyJ***", text)
    if "://" in text and "@" in text:
        text = _USER.sub("***", text)
    return text


def holds_credential(text: str) -> bool:
    """True if a part of ``text`` looks like a token, so that the text must not be shown."""
    return ("psg_" in text or "eyJ" in text) and _WHOLE.search(text) is not None
