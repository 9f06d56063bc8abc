"""Messages of equal length are split by position; for any bytes the result is as if they were parsed one by one."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol import frames
from plainsong.protocol.codec import FramesOptions
from plainsong.protocol.frames import BrokenFrames, decode_frames
from plainsong.protocol.ids import pack_id
from plainsong.protocol.page import Page, item
from tests.codecs import encode_frames


def walked(data: bytes, attributes: bool) -> object:
    with mock.patch.object(frames, "_MIN_ALIKE_BYTES", 1 << 40):
        return outcome(data, attributes)


def outcome(data: bytes, attributes: bool) -> object:
    try:
        return decode_frames(data, attributes=attributes)
    except BrokenFrames:
        return BrokenFrames


def encoded(sizes: list[int], attributes: bool) -> bytes:
    items = [item(pack_id(1 << 40, n), b"\xff" * size) for n, size in enumerate(sizes)]
    return encode_frames(Page(items, len(items)), FramesOptions(attributes=attributes))


@given(st.integers(20, 60), st.integers(0, 60), st.booleans(), st.data())
def test_both_decoders_agree_on_every_wrong_byte(count: int, size: int, attributes: bool, data: st.DataObject):
    body = bytearray(encoded([size] * count, attributes))
    assert outcome(bytes(body), attributes) == walked(bytes(body), attributes)
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    assert outcome(bytes(body), attributes) == walked(bytes(body), attributes)
    cut = bytes(body[: data.draw(st.integers(0, len(body)))])
    assert outcome(cut, attributes) == walked(cut, attributes)


@given(st.lists(st.sampled_from([0, 1, 29, 58]), min_size=20, max_size=60), st.booleans())
def test_lengths_that_add_up_by_chance_are_not_misread(sizes: list[int], attributes: bool):
    body = encoded(sizes, attributes)
    assert [len(frame.payload) for frame in decode_frames(body, attributes=attributes)] == sizes


def test_an_invalid_id_ends_no_page_early():
    body = bytearray(encoded([10] * 50, attributes=True))
    stride = 24 + 10 + 5
    body[7 * stride : 7 * stride + 20] = frames.FRAMES_END
    assert outcome(bytes(body), attributes=True) is BrokenFrames
