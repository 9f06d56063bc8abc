"""Tephra's calls and replies: the same bytes as a Thrift library's, in both directions; all other input is refused."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tephra_thrift import TEPHRA, i64, struct_of, transactions
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport import TMemoryBuffer

from plainsong.protocol.tephra.rpc import (
    BINARY,
    BOOLEAN,
    BOXED_BOOLEAN,
    ILLEGAL_ARGUMENT,
    INT,
    INTERNAL_ERROR,
    KEYS,
    LONG,
    METHODS,
    POINTERS,
    PROTOCOL_ERROR,
    TEXT,
    TRANSACTION,
    UNKNOWN_METHOD,
    ApplicationError,
    Call,
    RefusedCall,
    TephraConflict,
    TephraCouldNotTakeSnapshot,
    TephraError,
    TephraGeneric,
    TephraInvalidTruncateTime,
    TephraNotInProgress,
    decode_call,
    decode_reply,
    encode_call,
    encode_error,
    encode_failure,
    encode_result,
)
from plainsong.protocol.tephra.thrift import (
    MAX_BINARIES,
    MAX_FRAME_BYTES,
    MalformedThrift,
    ThriftFrames,
    ThriftFrameTooLarge,
    framed,
)

#: Made with thriftpy2, with sequence id 1, and accepted by the genuine Java service.
GOLDEN = {
    ("status",): "00000013 80010001 00000006 737461747573 00000001 00",
    ("startShortWithTimeout", 30): "00000029 80010001 00000015 737461727453686f72745769746854696d656f7574 00000001"
    "08 0001 0000001e 00",
    ("commitOrThrow", 200, 250): "00000030 80010001 0000000d 636f6d6d69744f725468726f77 00000001"
    "0a 0001 00000000000000c8 0a 0002 00000000000000fa 00",
    ("canCommitOrThrow", 200, (b"k",)): "00000035 80010001 00000010 63616e436f6d6d69744f725468726f77 00000001"
    "0a 0001 00000000000000c8 0e 0002 0b 00000001 00000001 6b 00",
}

by_kind = {
    BOOLEAN: st.booleans(),
    BOXED_BOOLEAN: st.booleans(),
    INT: st.integers(-(2**31), 2**31 - 1),
    LONG: i64,
    TEXT: st.text(max_size=20),
    BINARY: st.binary(max_size=50),
    KEYS: st.lists(st.binary(max_size=10), max_size=5).map(tuple),
    POINTERS: st.lists(i64, max_size=5).map(tuple),
    TRANSACTION: transactions,
}
calls = st.sampled_from(sorted(METHODS)).flatmap(
    lambda name: st.tuples(st.just(name), st.tuples(*(by_kind[kind] for kind in METHODS[name].args)))
)
results = st.sampled_from(sorted(METHODS)).flatmap(
    lambda name: st.tuples(st.just(name), by_kind.get(METHODS[name].result, st.none()))
)


def theirs(kind, value):
    """Convert a value to thriftpy2's types."""
    if kind is TRANSACTION:
        return struct_of(value)
    if kind is BOXED_BOOLEAN:
        return TEPHRA.TBoolean(value=value)
    return list(value) if isinstance(value, tuple) else value


def message(name, kind, sequence_id, payload):
    out = TMemoryBuffer()
    protocol = TBinaryProtocol(out)
    protocol.write_message_begin(name, kind, sequence_id)
    protocol.write_struct(payload)
    return bytes(out.getvalue())


@pytest.mark.parametrize("asked", GOLDEN, ids=lambda asked: asked[0])
def test_calls_have_the_bytes_that_tephra_accepts(asked):
    written = bytes.fromhex(GOLDEN[asked])
    assert framed(encode_call(asked[0], 1, *asked[1:])) == written
    frames = ThriftFrames()
    frames.feed(written)
    assert decode_call(frames.take()) == Call(asked[0], 1, asked[1:])


@given(calls, st.integers(-(2**31), 2**31 - 1))
def test_calls_equal_those_of_a_thrift_library(call, sequence_id):
    name, args = call
    names = [spec[1] for _, spec in sorted(getattr(TEPHRA.TTransactionServer, name + "_args").thrift_spec.items())]
    values = [theirs(kind, value) for kind, value in zip(METHODS[name].args, args, strict=True)]
    payload = getattr(TEPHRA.TTransactionServer, name + "_args")(**dict(zip(names, values, strict=True)))
    data = encode_call(name, sequence_id, *args)
    assert data == message(name, TMessageType.CALL, sequence_id, payload)
    assert decode_call(data) == Call(name, sequence_id, args)


@given(results)
def test_results_equal_those_of_a_thrift_library(result):
    name, value = result
    payload = getattr(TEPHRA.TTransactionServer, name + "_result")()
    if value is not None:
        payload.success = theirs(METHODS[name].result, value)
    data = encode_result(Call(name, 7, ()), value)
    assert data == message(name, TMessageType.REPLY, 7, payload)
    assert decode_reply(data, name, 7) == value


@pytest.mark.parametrize(
    ("name", "error", "field", "struct"),
    [
        ("commitTx", TephraNotInProgress("gone"), "e", TEPHRA.NotInProgress("gone")),
        ("canCommitOrThrow", TephraConflict(9, "k", "me"), "c", TEPHRA.Conflict(9, "k", "me")),
        ("commitOrThrow", TephraConflict(9, "k", None), "c", TEPHRA.Conflict(9, "k")),
        ("startShortWithTimeout", TephraGeneric("no", ILLEGAL_ARGUMENT), "e", TEPHRA.Generic("no", ILLEGAL_ARGUMENT)),
        ("canCommitOrThrow", TephraGeneric("big", "x.Y"), "g", TEPHRA.Generic("big", "x.Y")),
        ("getSnapshot", TephraCouldNotTakeSnapshot("disk"), "e", TEPHRA.CouldNotTakeSnapshot("disk")),
        ("truncateInvalidTxBefore", TephraInvalidTruncateTime("old"), "e", TEPHRA.InvalidTruncateTime("old")),
    ],
)
def test_declared_errors_equal_those_of_a_thrift_library(name, error, field, struct):
    payload = getattr(TEPHRA.TTransactionServer, name + "_result")(**{field: struct})
    data = encode_error(Call(name, 7, ()), error)
    assert data == message(name, TMessageType.REPLY, 7, payload)
    with pytest.raises(type(error)) as caught:
        decode_reply(data, name, 7)
    assert caught.value.args == tuple(value for value in error.args if value is not None)


def test_an_error_that_a_method_does_not_declare_is_an_internal_error():
    data = encode_error(Call("abortTx", 7, ()), TephraNotInProgress("committed"))
    found = TApplicationException(INTERNAL_ERROR, "Internal error processing abortTx: committed")
    assert data == message("abortTx", TMessageType.EXCEPTION, 7, found)
    with pytest.raises(ApplicationError, match="committed") as caught:
        decode_reply(data, "abortTx", 7)
    assert caught.value.number == INTERNAL_ERROR


def refusal(data):
    with pytest.raises(RefusedCall) as caught:
        decode_call(data)
    return caught.value


def test_an_unknown_method_is_refused_with_its_name_and_number():
    error = refusal(message("unknownToTephra", TMessageType.CALL, 5, TEPHRA.TBoolean()))
    assert (error.number, error.call) == (UNKNOWN_METHOD, Call("unknownToTephra", 5, ()))
    data = encode_failure(error.call, error.number, error.message)
    found = TApplicationException(UNKNOWN_METHOD, "Invalid method name: 'unknownToTephra'")
    assert data == message("unknownToTephra", TMessageType.EXCEPTION, 5, found)


HEAD = encode_call("canCommitOrThrow", 3, None, None)[:-1]
TX = struct.pack(">Bhq", 10, 1, 200)


@pytest.mark.parametrize(
    "args",
    [
        b"\0",  # both arguments are missing
        TX + b"\0",
        TX,  # no stop byte
        TX + struct.pack(">BhBi", 14, 2, 11, -1) + b"\0",
        TX + struct.pack(">BhBi", 14, 2, 11, 2**31 - 1) + b"\0",
        TX + struct.pack(">BhBi", 14, 2, 11, MAX_BINARIES + 1) + bytes(4 * MAX_BINARIES + 9),
        TX + struct.pack(">BhBii", 14, 2, 11, 1, 2) + b"k\0",
        TX + struct.pack(">BhBi", 14, 2, 10, 1) + bytes(9),
        TX + struct.pack(">Bh", 1, 9),
        TX + struct.pack(">BhBi", 15, 9, 1, 2**31 - 1),  # a list of items that take no bytes
        TX + struct.pack(">Bh", 12, 9) * 100 + bytes(101),
    ],
)
def test_malformed_arguments_are_refused_and_the_connection_can_continue(args):
    error = refusal(HEAD + args)
    assert (error.number, error.call.method, error.call.sequence_id) == (PROTOCOL_ERROR, "canCommitOrThrow", 3)


def test_a_transaction_without_an_id_is_refused():
    assert "no id" in refusal(encode_call("abortTx", 3, None)[:-1] + struct.pack(">Bh", 12, 1) + b"\0\0").message


def test_an_omitted_text_is_none():
    assert decode_call(encode_call("startShortClientId", 3, None)).args == (None,)


def test_a_text_that_is_not_utf_8_is_refused():
    error = refusal(encode_call("startShortClientId", 3, None)[:-1] + b"\x0b\0\1\0\0\0\1\xff\0")
    assert "UTF-8" in error.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x01\x00",
        b"GET / HTTP/1.1\r\n",
        bytes.fromhex("00000006 737461747573 01 00000001 00"),  # not strict
        bytes.fromhex("80020001 00000006 737461747573 00000001 00"),
        bytes.fromhex("80010002 00000006 737461747573 00000001 00"),  # a reply
        bytes.fromhex("80010001 7fffffff 737461747573 00000001 00"),
        bytes.fromhex("80010001 ffffffff 737461747573 00000001 00"),
        bytes.fromhex("80010001 00000006 737461747573 0000"),
        bytes.fromhex("80010001 00000200") + b"a" * 512 + bytes(5),
    ],
)
def test_an_invalid_call_is_refused(data):
    with pytest.raises(MalformedThrift):
        decode_call(data)


@given(st.binary(max_size=100), calls)
def test_noise_is_a_call_or_refused_and_nothing_else(noise, call):
    head = encode_call(call[0], 1, *call[1])[:-1]
    for data in (noise, head + noise, head[: len(noise)]):
        with suppress(MalformedThrift, RefusedCall):
            decode_call(data)


@given(st.binary(max_size=100), results)
def test_noise_is_a_reply_or_refused_and_nothing_else(noise, result):
    head = encode_result(Call(result[0], 1, ()), result[1])[:-1]
    for data in (noise, head + noise, head[: len(noise)]):
        with suppress(MalformedThrift, ApplicationError, TephraError):
            decode_reply(data, result[0], 1)


def test_an_answer_to_another_call_is_not_accepted():
    data = encode_result(Call("status", 7, ()), "OK")
    for name, sequence_id in (("status", 8), ("invalidTxSize", 7)):
        with pytest.raises(MalformedThrift, match="expected "):
            decode_reply(data, name, sequence_id)
    with pytest.raises(MalformedThrift, match="has no result"):
        decode_reply(data[: -len(b"\x0b\0\0\0\0\0\2OK\0")] + b"\0", "status", 7)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5), st.data())
def test_frames_may_arrive_in_pieces_of_any_size(messages, data):
    stream = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames, found = ThriftFrames(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames.feed(stream[start:stop])
        while (whole := frames.take()) is not None:
            found.append(whole)
    assert found == messages
    assert frames.is_empty


def test_frames_are_empty_only_between_messages():
    frames = ThriftFrames()
    assert frames.is_empty
    for piece in (b"\0\0", b"\0\x05ab"):
        frames.feed(piece)
        assert (frames.take(), frames.is_empty) == (None, False)
    frames.feed(b"cde")
    assert (frames.take(), frames.is_empty) == (b"abcde", True)


@pytest.mark.parametrize("size", [0, -1, -(2**31), MAX_FRAME_BYTES + 1, 2**31 - 1])
def test_a_frame_of_no_size_or_over_the_bound_is_refused_by_its_head(size):
    frames = ThriftFrames()
    frames.feed(struct.pack(">i", size))
    with pytest.raises(ThriftFrameTooLarge):
        frames.take()
