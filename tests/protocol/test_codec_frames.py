"""Frames: encoding, decoding, and refusal of a body truncated at any byte."""

from __future__ import annotations

import struct
import subprocess
import sys
from contextlib import suppress

import codec_records as records
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.codec import FramesOptions, accept_frames
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.frames import BrokenFrames, decode_frames
from plainsong.protocol.page import Page
from tests.codecs import encode_frames
from tests.patience import PATIENCE_S

ID = bytes(range(20))
OPTIONS = [FramesOptions(pointers, attributes) for pointers in (False, True) for attributes in (False, True)]
END = b"\xff" * 20
FRAMES = "application/vnd.plainsong.frames"


def sample() -> Page:
    page = records.page_of([(ID, b"m2"), (ID, b"")])
    page.pointers = {1: -5}
    page.attributes = {1: {"k": "é"}}
    return page


def test_frames_have_the_bytes_of_the_contract():
    head = ID + struct.pack(">I", 2) + b"m2" + ID + struct.pack(">I", 0)
    assert encode_frames(sample(), FramesOptions()) == head + END + struct.pack(">I", 2)


def test_frames_with_pointers_have_them_after_the_id():
    first = ID + struct.pack(">qI", 0, 2) + b"m2"
    second = ID + struct.pack(">qI", -5, 0)
    assert encode_frames(sample(), FramesOptions(pointers=True)) == first + second + END + struct.pack(">I", 2)


def test_frames_of_version_2_have_attributes_after_the_payload():
    packed = msgpack.packb({"k": "é"})
    first = ID + struct.pack(">I", 2) + b"m2" + struct.pack(">I", 1) + b"\x80"
    second = ID + struct.pack(">I", 0) + struct.pack(">I", len(packed)) + packed
    assert encode_frames(sample(), FramesOptions(attributes=True)) == first + second + END + struct.pack(">I", 2)


def test_an_empty_page_is_the_end_alone():
    assert encode_frames(Page(), FramesOptions()) == END + bytes(4)
    assert decode_frames(END + bytes(4)) == []


@pytest.mark.parametrize("options", OPTIONS)
@given(page=records.pages())
def test_frames_round_trip(options, page):
    found = decode_frames(encode_frames(page, options), pointers=options.pointers, attributes=options.attributes)
    assert [frame[:2] for frame in found] == list(page.messages())
    pointers = page.pointers if options.pointers else {}
    attributes = page.attributes if options.attributes else {}
    assert [frame.pointer for frame in found] == [pointers.get(index, 0) for index in range(page.count)]
    assert [frame.attributes for frame in found] == [attributes.get(index, {}) for index in range(page.count)]


@given(st.dictionaries(records.texts, st.text("é", min_size=20, max_size=400), max_size=20))
def test_attributes_of_every_size_round_trip(attributes):
    page = Page(sample().parts, 2, attributes={0: attributes, 1: {"big": "x" * 70_000}})
    found = decode_frames(encode_frames(page, FramesOptions(attributes=True)), attributes=True)
    assert found[0].attributes == attributes
    assert found[1].attributes == {"big": "x" * 70_000}


@pytest.mark.parametrize("options", OPTIONS)
def test_frames_cut_at_any_byte_are_an_error_and_never_an_end(options):
    whole = encode_frames(sample(), options)
    for length in range(len(whole)):
        with pytest.raises(BrokenFrames):
            decode_frames(whole[:length], pointers=options.pointers, attributes=options.attributes)
    with pytest.raises(BrokenFrames):
        decode_frames(whole + b"\x00", pointers=options.pointers, attributes=options.attributes)


def test_a_count_that_does_not_agree_is_an_error():
    with pytest.raises(BrokenFrames, match="counts 3 messages, but 2 precede it"):
        decode_frames(encode_frames(sample(), FramesOptions())[:-1] + b"\x03")


@pytest.mark.parametrize("pointers", [False, True])
@pytest.mark.parametrize("attributes", [False, True])
@given(data=st.data())
def test_damaged_frames_are_read_or_refused(pointers, attributes, data):
    body = bytearray(encode_frames(sample(), FramesOptions(pointers, attributes)))
    at = data.draw(st.integers(0, len(body)))
    body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    with suppress(BrokenFrames):
        decode_frames(bytes(body), pointers=pointers, attributes=attributes)


def test_the_decoder_needs_the_standard_library_alone():
    check = "import sys, plainsong.protocol.frames; assert not {'fastavro', 'msgpack'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=PATIENCE_S)


# --- requests for frames -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "options"),
    [
        (FRAMES, FramesOptions()),
        (FRAMES.upper(), FramesOptions()),
        (f"application/json, {FRAMES};q=0.1", FramesOptions()),
        (f"text/html, {FRAMES} ; fields=pointer , */*", FramesOptions(pointers=True)),
        (f"{FRAMES}; version=2", FramesOptions(attributes=True)),
        (f"{FRAMES};version=1", FramesOptions()),
        (f'{FRAMES}; Version="2"; fields="pointer"; q=1', FramesOptions(True, True)),
        (f"{FRAMES}; version=9, {FRAMES}", FramesOptions()),
        (f"{FRAMES}; q=0, {FRAMES}; version=2", FramesOptions(attributes=True)),
        (f'x/y; a="\\",", {FRAMES}', FramesOptions()),
    ],
)
def test_frames_are_found_anywhere_in_accept(accept, options):
    assert accept_frames(accept) == options


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "",
        "*/*",
        "application/*",
        "application/json",
        FRAMES + "x",
        f"{FRAMES};q=0",
        f"{FRAMES}; q=0.000",
        f'a/b;x="{FRAMES}"',
    ],
)
def test_frames_are_sent_only_on_request(accept):
    assert accept_frames(accept) is None


@pytest.mark.parametrize("parameter", ["version=3", "fields=payload", "version="])
def test_frames_of_an_unknown_kind_are_refused_clearly(parameter):
    with pytest.raises(InvalidParameter) as caught:
        accept_frames(f"{FRAMES}; {parameter}")
    assert "version=1 or 2" in caught.value.hint


def test_the_type_of_frames_names_their_content():
    assert [options.content_type for options in OPTIONS] == [
        FRAMES,
        FRAMES + "; version=2",
        FRAMES + "; fields=pointer",
        FRAMES + "; version=2; fields=pointer",
    ]


@given(st.text(st.characters(max_codepoint=255), max_size=80))
def test_any_accept_header_is_read(text):
    accept_frames(FRAMES + text)
