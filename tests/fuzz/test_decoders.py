"""Every decoder and every security file: any bytes are either accepted or refused with a documented error.

The ordinary run uses hypothesis; the long run makes a million inputs for each decoder, from one seed.
"""

from __future__ import annotations

import logging
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import BY_NAME, Decoder

USUAL = 50
#: Number of random inputs without hypothesis, which takes ten times as long for each.
MANY = 1_000
LONG = 1_000_000
NAMES = pytest.mark.parametrize("name", BY_NAME)
#: Bytes that break decoders: boundaries of numbers, wrong lengths, invalid text, deep nesting.
AWKWARD = [
    *(bytes([value]) * size for value in (0, 1, 0x7F, 0x80, 0xFF) for size in (1, 2, 4, 8)),
    *(bytes([kind]) for kind in (0xC0, 0xC1, 0xC4, 0xC7, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0x81, 0x91, 0x0B, 0x0C, 0x0F)),
    *(
        b"null",
        b"true",
        b"NaN",
        b"-1",
        b"1e999",
        b'""',
        b"{}",
        b"[]",
        b'"\\ud800"',
        b"9" * 30,
        b"1" * 5000,
        b"\xed\xa0\x80",
    ),
    *(
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b"\x91" * 20_000,
        b"a=" * 300,
        b"[[a]]\n",
        b"=",
        b'"',
        b"\\",
        b"\r\n",
        b"%",
        b"%zz",
        b":",
        b",",
        b";",
    ),
]
edits = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.integers(0, 8), st.sampled_from(AWKWARD) | st.binary(max_size=4)), max_size=4
)


def damaged(seed: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Apply changes to the seed, one after another: position, number of bytes removed, replacement."""
    data = bytearray(seed)
    for place, gone, instead in changes:
        at = place % (len(data) + 1)
        data[at : at + gone] = instead
    return bytes(data)


def read_or_refuse(decoder: Decoder, data: bytes) -> None:
    try:
        decoder.read(data)
    except decoder.refuses:
        pass
    except Exception as error:
        raise AssertionError(f"{decoder.name}: {error!r} for {data[:400].hex()}") from error


@NAMES
def test_encoded_values_are_decoded_unchanged(name):
    decoder = BY_NAME[name]
    taken = 0
    for seed in decoder.seeds:
        try:
            decoder.read(seed)
            taken += 1
        except decoder.refuses:
            pass
    assert taken, "none of these bytes leads beyond the first check"


@NAMES
@pytest.mark.parametrize("nest", [b"[", b'{"a":', b'{"format":[', b"\x91", b"\x81\xa1a", b"0"])
@pytest.mark.parametrize("begin", [b"", b"a = "])
def test_deep_nesting_and_long_numbers_are_read_or_refused(name, nest, begin):
    read_or_refuse(BY_NAME[name], begin + nest * 20_000)


@NAMES
def test_any_bytes_are_read_or_refused(name):
    decoder = BY_NAME[name]

    @settings(
        max_examples=USUAL,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.builds(damaged, st.sampled_from([*decoder.seeds, b""]), edits) | st.binary(max_size=80))
    def run(data: bytes) -> None:
        read_or_refuse(decoder, data)

    run()


@pytest.fixture
def _silent():
    """Disable logging: some decoders log input that they cannot read, and pytest would keep a million lines."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@NAMES
@pytest.mark.usefixtures("_silent")
def test_many_inputs_are_read_or_refused(name):
    hammer(BY_NAME[name], MANY)


@pytest.mark.torture
@NAMES
@pytest.mark.usefixtures("_silent")
def test_a_million_inputs_are_read_or_refused(name):
    hammer(BY_NAME[name], LONG)


def hammer(decoder: Decoder, count: int) -> None:
    # Mostly variants of accepted bytes, since others do not pass the first check.
    rng, seeds = Random(16), [*decoder.seeds * 9, b""]
    for _ in range(count):
        changes = [
            (rng.randrange(1 << 16), rng.choice((0, 0, 1, 1, 2, 8, 40)), _instead(rng))
            for _ in range(rng.randint(1, 4))
        ]
        read_or_refuse(decoder, damaged(rng.choice(seeds), changes))


def _instead(rng: Random) -> bytes:
    if rng.random() < 0.4:
        # Deep nesting takes most of the time, so a few thousand inputs with it are enough.
        found = rng.choice(AWKWARD)
        return found if len(found) < 1000 or rng.random() < 0.02 else b""
    return rng.randbytes(rng.choice((0, 1, 1, 1, 2, 4)))
