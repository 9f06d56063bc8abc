"""Segments, seals and leases: exact round trips, and everything else is refused."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.effects import Table
from storage.replication.notices import (
    EpochSeal,
    Lease,
    Registration,
    decode_lease,
    decode_seal,
    encode_lease,
    encode_seal,
    log_name,
)
from storage.replication.segment import (
    ASYNC,
    SYNC,
    Change,
    Commit,
    DamagedLog,
    Segment,
    decode_segment,
    digest,
    encode_segment,
    is_segment,
    segment_of,
)

PAGE = (Path(__file__).parents[3] / "docs/format.md").read_text(encoding="utf-8")
CLOCK_MS = 1_700_000_000_000
RUN = bytes(range(16))
HEAD_BYTES = 106
NAME = b"shop:orders:"
EXAMPLE = segment_of(
    epoch=7,
    number=2,
    run=RUN,
    mode=ASYNC,
    first=41,
    before=digest(b"the object before"),
    commits=[
        Commit(
            CLOCK_MS,
            (
                Change(Table.MESSAGE, NAME + struct.pack(">iqH", 1, CLOCK_MS, 0), b"\x00\x05hello"),
                Change(Table.METADATA, b"\x00h" + NAME + struct.pack(">i", 1), None),
            ),
        ),
        Commit(CLOCK_MS + 9, (Change(Table.METADATA, NAME, b"\x01\x80"),)),
    ],
)

changes = st.builds(Change, st.sampled_from(Table), st.binary(max_size=40), st.none() | st.binary(max_size=40))
commits = st.builds(Commit, st.integers(0, 1 << 50), st.lists(changes, max_size=4).map(tuple))
numbers = st.integers(1, (1 << 63) - 1)


def shown(name):
    """Return the bytes of a hex block in the documentation, and by label the bytes after each label."""
    (block,) = re.findall(rf"^```hex {name}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    parts, label = {}, ""
    for line in block.splitlines():
        found = re.fullmatch(r"(\w+)?\s+([0-9a-f]{2}(?: [0-9a-f]{2})*)\s{2,}\S.*", line)
        assert found, line
        label = found[1] or label
        parts[label] = parts.get(label, b"") + bytes.fromhex(found[2])
    return parts


def with_checksum(data):
    return data + struct.pack(">I", zlib.crc32(data))


def test_the_segment_on_the_page_is_the_one_that_the_code_reads_and_writes():
    page = shown("segment")
    assert decode_segment(b"".join(page.values())) == EXAMPLE
    assert zlib.decompress(page["stream"]) == shown("commits-of-segment")["body"]
    written = encode_segment(EXAMPLE)
    assert written[:HEAD_BYTES] == page["head"]
    assert zlib.decompress(written[HEAD_BYTES:-4]) == shown("commits-of-segment")["body"]


def test_the_seal_and_the_lease_on_the_page_are_those_that_the_code_writes():
    assert encode_seal(EpochSeal(8, RUN)).decode() in PAGE
    lease = encode_lease(Lease(7, RUN, standbys=(Registration("0123abcd", beat=1, commit=40),))).decode()
    lease = re.sub('"run":"[0-9a-f]{32}"', '"run":"<32 hex digits>"', lease)
    assert lease.replace("0123abcd", "<8 hex digits>") in PAGE


@given(numbers, numbers, numbers, st.sampled_from([ASYNC, SYNC]), st.lists(commits, min_size=1, max_size=4))
def test_every_segment_is_read_back_unchanged(epoch, number, first, mode, its_commits):
    before = digest(b"x")
    segment = segment_of(
        epoch=epoch, number=number, run=RUN, mode=mode, first=first, before=before, commits=its_commits
    )
    data = encode_segment(segment)
    assert decode_segment(data) == segment
    assert encode_segment(segment) == data


def test_an_opening_segment_has_no_commits_and_ends_before_its_first():
    opening = Segment(1, 1, RUN, ASYNC, 42, bytes(32), (), CLOCK_MS, CLOCK_MS)
    assert decode_segment(encode_segment(opening)) == opening
    assert opening.last == 41


def test_every_flipped_bit_and_every_truncation_of_a_segment_is_noticed():
    data = encode_segment(EXAMPLE)
    for at in range(len(data)):
        for bit in range(8):
            with pytest.raises(DamagedLog):
                decode_segment(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(DamagedLog):
            decode_segment(data[:at])
    with pytest.raises(DamagedLog):
        decode_segment(data + b"\x00")


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (slice(4, 5), b"\x02", "format 2"),
        (slice(5, 6), b"\x03", "contradicts"),
        (slice(46, 54), struct.pack(">Q", 43), "contradicts"),
        (slice(54, 62), struct.pack(">q", CLOCK_MS + 1), "contradicts"),
        (slice(62, 70), struct.pack(">q", CLOCK_MS + 10), "contradicts"),
        (slice(102, 106), struct.pack(">I", 111), "111 bytes"),
        (slice(102, 106), struct.pack(">I", 113), "113 bytes"),
        (slice(102, 106), b"\xff\xff\xff\xff", "4294967295 bytes"),
    ],
)
def test_a_head_that_contradicts_its_commits_is_damage_even_with_a_correct_checksum(place, value, why):
    data = bytearray(encode_segment(EXAMPLE)[:-4])
    data[place] = value
    with pytest.raises(DamagedLog, match=why):
        decode_segment(with_checksum(bytes(data)))


@pytest.mark.parametrize(
    "body",
    [
        b"\x00",
        struct.pack(">qI", 1, 1),
        struct.pack(">qIBI", 1, 1, 2, 5) + b"abc",
        struct.pack(">qIBI", 1, 1, 9, 0) + struct.pack(">I", 0),
    ],
    ids=["half a commit", "no change", "half a key", "an unknown table"],
)
def test_commits_that_do_not_parse_are_damage(body):
    head = bytearray(encode_segment(EXAMPLE)[:HEAD_BYTES])
    head[102:] = struct.pack(">I", len(body))
    with pytest.raises(DamagedLog, match="parsed"):
        decode_segment(with_checksum(bytes(head) + zlib.compress(body)))


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_seals_and_leases_are_read_back_and_are_not_segments(flags):
    clean, gap = flags
    seal, lease = EpochSeal(8, RUN, clean, gap), Lease(8, RUN)
    assert decode_seal(encode_seal(seal)) == seal
    assert decode_lease(encode_lease(lease)) == lease
    assert not is_segment(encode_seal(seal))
    assert is_segment(encode_segment(EXAMPLE))


def test_urls_that_no_header_can_carry_are_left_out_of_a_lease():
    urls = (
        "http://db-1:7420",
        "http://d\xe9:7420",
        "http://\u6771\u4eac",
        "http://a\r\nX-Injected: 1",
        "https://[::1]:1",
    )
    assert decode_lease(encode_lease(Lease(8, RUN, urls=urls))).urls == (urls[0], urls[-1])


NO_NOTICES = [b"", b"[]", b"{", b"{}"]


@pytest.mark.parametrize(
    "data",
    [
        *NO_NOTICES,
        encode_seal(EpochSeal(8, RUN)).replace(b"true", b"1"),
        encode_seal(EpochSeal(8, RUN)).replace(b":8", b":true"),
        encode_seal(EpochSeal(8, RUN)).replace(b"0f", b"0"),
    ],
)
def test_an_invalid_seal_is_damage(data):
    with pytest.raises(DamagedLog):
        decode_seal(data)


@pytest.mark.parametrize("data", [*NO_NOTICES, encode_lease(Lease(8, RUN)).replace(b"0f", b"0")])
def test_an_invalid_lease_is_damage(data):
    with pytest.raises(DamagedLog):
        decode_lease(data)


def test_names_of_the_log_sort_as_epochs_and_numbers_do():
    names = [log_name(epoch, number) for epoch in (2, 10) for number in (9, 10, 1 << 62)]
    assert names == sorted(names)
    assert names[0] == "log/00000000000000000002/00000000000000000009"
