"""An effect that posts to a URL: the payload is the body, the rest headers, the status the verdict.

2xx is done. 4xx rejects the message permanently, unless the status concerns the caller or the moment rather than the
message. Those statuses, 5xx, redirects and broken connections are retried.
"""

from __future__ import annotations

import math
import re
import select
import socket
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from plainsong import __version__
from plainsong.calls import Answer, Failure, Request, Send
from plainsong.protocol.errors import InvalidParameter
from plainsong.react.reaction import Done, Reject, Retry
from plainsong.react.stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from typing import Any

    from plainsong.messages import Message
    from plainsong.react.reaction import Verdict
    from plainsong.react.signing import Signer
    from plainsong.react.stopping import Stop
    from plainsong.transport.outward import Outward

#: 4xx statuses that concern not the message but the caller (401, 403, 407) or the moment (408, 425, 429).
RETRIED = frozenset({401, 403, 407, 408, 421, 425, 429})
#: Characters of an answer's first line that a verdict quotes.
MAX_QUOTED = 300
CONNECT_TIMEOUT_S = 10.0
_TOKEN = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~%-]+\Z")
_OURS = re.compile(r"(?i)(plainsong-.*|idempotency-key|host|content-length|transfer-encoding|connection)\Z")
_OF_SIGNATURES = ("webhook-id", "webhook-timestamp", "webhook-signature")


class Poster:
    """Posts each message.

    Args:
      outward: the HTTP client.
      url: http or https.
      namespace: the topic's namespace.
      headers: further headers, checked by ``checked_header``.
      retry_all: retry every status but 2xx.
      signer: signs each post; None: posts are not signed.
    Raises:
      InvalidParameter: the URL cannot be posted to, or a header is one of those that the signer sets.
    """

    def __init__(
        self,
        outward: Outward,
        url: str,
        namespace: str,
        *,
        content_type: str = "application/octet-stream",
        headers: Sequence[tuple[str, str]] = (),
        timeout_s: float,
        retry_all: bool = False,
        stop: Stop,
        signer: Signer | None = None,
    ) -> None:
        if signer is not None and (taken := [name for name, _ in headers if name.lower() in _OF_SIGNATURES]):
            raise InvalidParameter(f"the header {taken[0]} is set for each message", hint="remove it")
        self._outward = outward
        self._base, self._target = place_and_target(url)
        self._namespace = namespace
        self._headers = (("User-Agent", f"plainsong/{__version__}"), ("Content-Type", content_type), *headers)
        self._timeout_s = timeout_s
        self._retry_all = retry_all
        self._stop = stop
        self._signer = signer

    def __call__(self, message: Message, attempt: int) -> Verdict:
        """Sends one request. Raises Stopped: it was abandoned for a stop, with an unknown outcome."""
        headers = (*self._headers, *headers_of(message, self._namespace, attempt))
        if self._signer is not None:
            try:
                headers = (*headers, *self._signer.headers_of(message, self._namespace, int(time())))
            except InvalidParameter as error:  # the file is being replaced; it may be complete at the next attempt
                return Retry(error.detail)
        request = Request("POST", self._target, headers, message.payload)
        send = Send(self._base, request, min(CONNECT_TIMEOUT_S, self._timeout_s), self._timeout_s)
        answer = awaited(self._outward.start(send), self._stop)
        return verdict_of(answer, retry_all=self._retry_all)


def place_and_target(url: str) -> tuple[str, str]:
    """Splits a URL into ``https://host:port`` and ``/path?query``. Raises InvalidParameter."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidParameter(f"cannot post to {url[:200]!r}", hint="for example https://example.com/hook")
    if parts.username is not None or parts.fragment:
        raise InvalidParameter("the URL must have neither user nor fragment", hint="use --header @FILE for secrets")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?[]")
    return f"{parts.scheme}://{parts.netloc}", path + (f"?{query}" if query else "")


def checked_header(line: str) -> tuple[str, str]:
    """Parses ``Name: value``. Raises InvalidParameter: malformed, or a header that is set for each message."""
    name, colon, value = line.partition(":")
    name, value = name.strip(), value.strip()
    if not colon or not _TOKEN.match(name) or not all(" " <= char <= "~" or char == "\t" for char in value):
        raise InvalidParameter(f"invalid header {name[:80]!r}", hint="write 'Name: value' in printable ASCII")
    if _OURS.match(name):
        raise InvalidParameter(f"the header {name} is set for each message", hint="remove it")
    return name, value


def headers_of(message: Message, namespace: str, attempt: int) -> list[tuple[str, str]]:
    """The headers that describe a message.

    In names and values of attributes, ``%``, characters other than printable ASCII, and blanks at the ends are
    percent-encoded.
    """
    message_id = str(message.id)
    headers = [
        ("Idempotency-Key", f"{namespace}:{message.topic}:{message_id}"),
        ("Plainsong-Message-Id", message_id),
        ("Plainsong-Namespace", namespace),
        ("Plainsong-Topic", message.topic),
        ("Plainsong-Publish-Time-Ms", str(message.id.publish_time_ms)),
        ("Plainsong-Attempt", str(attempt)),
    ]
    for name, value in message.attributes.items():
        headers.append((f"Plainsong-Attribute-{quote(name, safe=_NAME_SAFE)}", encoded(value)))
        if name.lower() in ("traceparent", "tracestate") and value.isascii() and value.isprintable():
            headers.append((name.lower(), value.strip()))
    return headers


_NAME_SAFE = "!#$&'*+^`|"
_VALUE_SAFE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def encoded(value: str) -> str:
    """Encodes an attribute's value; ``urllib.parse.unquote`` decodes it."""
    text = quote(value, safe=_VALUE_SAFE)
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    return "%20" * left + inner + "%20" * (len(text) - left - len(inner))


def verdict_of(answer: Answer | Failure, *, retry_all: bool = False) -> Verdict:
    """The verdict for an answer, or for the failure to get one."""
    if isinstance(answer, Failure):
        return Retry(answer.detail)
    if 200 <= answer.status < 300:
        return Done()
    first = answer.body.decode("utf-8", "backslashreplace").strip().partition("\n")[0]
    quoted = "".join(char if char.isprintable() else " " for char in first)[:MAX_QUOTED].strip()
    why = f"status {answer.status}" + (f": {quoted}" if quoted else "")
    if 400 <= answer.status < 500 and answer.status not in RETRIED and not retry_all:
        return Reject(why)
    return Retry(why, retry_after_s(answer.headers, datetime.now(UTC)))


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float:
    """``Retry-After`` in seconds from now; 0 when it is absent or malformed."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0.0
    return max(0.0, ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now).total_seconds())


def awaited(future: Future[Any], stop: Stop) -> Any:
    """Waits for a future of another thread. Raises Stopped, and cancels it, when the stop's grace period is over."""
    reading, writing = socket.socketpair()
    with reading, writing:
        future.add_done_callback(lambda _: _wake(writing))
        while not future.done():
            left_s = stop.until_s - monotonic()
            if left_s <= 0:
                future.cancel()
                raise Stopped
            waited = [reading.fileno(), stop.fileno()]
            ready = select.select(waited, [], [], None if left_s == math.inf else left_s)[0]
            if stop.fileno() in ready:
                stop.acknowledge()
        return future.result()


def _wake(writing: socket.socket) -> None:
    with suppress(OSError):  # the waiting side is closed
        writing.send(b"\0")
