"""Frames survive a round trip, however a connection splits them; invalid bytes end the connection."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.errors import MalformedBody
from plainsong.protocol.link import MAX_FRAME_BYTES, VOCABULARY, FrameKind, FrameReader, FrameTooLarge, FrameWriter

FRAMES = [
    [FrameKind.CALL, 1, "kind", {"a": (1, 2)}, b"body", 1.5],
    [FrameKind.BEGIN, 2, "kind", None, 7, None],
    [FrameKind.PIECE, 2, b"1234567", False],
    [FrameKind.OPEN, 3, "talk", [1]],
    [FrameKind.CANCEL, 1],
    [FrameKind.PING, 0],
    [FrameKind.LEAVING, 0],
]


def written(frames) -> bytes:
    return b"".join(FrameWriter().encode(*frame) for frame in frames)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_frames_are_reassembled_however_they_are_split(cuts):
    data, reader, found = written(FRAMES * 3), FrameReader(), []
    at = 0
    for cut in (*cuts, len(data)):
        found += reader.feed(data[at : at + cut])
        at += cut
    assert found == [list(frame) for frame in FRAMES * 3]
    assert reader.begun_bytes == 0


def test_incomplete_frames_are_counted():
    reader = FrameReader()
    assert reader.feed(written(FRAMES[:1])[:-1]) == []
    assert reader.begun_bytes > 0


def test_a_frame_that_announces_too_much_is_refused_by_its_head():
    with pytest.raises(FrameTooLarge):
        FrameReader().feed(struct.pack(">I", MAX_FRAME_BYTES + 1))
    assert FrameReader().feed(struct.pack(">I", MAX_FRAME_BYTES)) == []


def test_an_oversized_frame_is_not_made():
    with pytest.raises(FrameTooLarge):
        FrameWriter().encode(FrameKind.PIECE, 1, bytes(MAX_FRAME_BYTES), False)


def test_a_frame_that_cannot_be_made_leaves_nothing_in_the_next():
    writer = FrameWriter()
    with pytest.raises(TypeError):
        writer.encode(FrameKind.CALL, 1, "kind", [b"x" * 1000, object()], b"", None)
    assert writer.encode(FrameKind.CANCEL, 1) == FrameWriter().encode(FrameKind.CANCEL, 1)


@pytest.mark.parametrize(
    "value",
    [1, None, [], [1], [1, 2], ["CALL", 1], [1.0, 1], [99, 1], [FrameKind.CANCEL, 1, 2], [FrameKind.PING, b""], {1: 2}],
)
def test_values_that_are_not_a_frame_are_refused(value):
    packed = VOCABULARY.pack(
        [int(each) if isinstance(each, FrameKind) else each for each in value] if isinstance(value, list) else value
    )
    with pytest.raises(MalformedBody):
        FrameReader().feed(struct.pack(">I", len(packed)) + packed)


@given(st.binary(max_size=300))
def test_any_bytes_are_frames_or_refused(data):
    with suppress(MalformedBody):
        FrameReader().feed(data)
