"""Hypercorn's HTTP/2 with all patches."""

from __future__ import annotations

from broker.http.http2.contradicted_lengths import ContradictedLengths
from broker.http.http2.extended_connect import ExtendedConnect
from broker.http.http2.frame_floods import FrameFloods
from broker.http.http2.late_data import LateData
from broker.http.http2.malformed_requests import MalformedRequests
from broker.http.http2.priorities import Priorities
from broker.http.http2.small_windows import SmallWindows
from broker.http.http2.unfinished_uploads import UnfinishedUploads
from broker.http.http2.unknown_methods import UnknownMethods


class Http2Protocol(
    FrameFloods,
    MalformedRequests,
    UnknownMethods,
    LateData,
    UnfinishedUploads,
    SmallWindows,
    ExtendedConnect,
    Priorities,
    ContradictedLengths,
):
    """The protocol of one connection."""
