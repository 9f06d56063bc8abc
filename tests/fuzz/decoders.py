"""Every decoder of bytes from outside: with bytes that it accepts, and the errors it may raise for others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import plyvel

from broker.api.operations.definitions import _decoded as decode_definitions
from broker.api.routes import ROUTES
from broker.config.config import config_of
from broker.http.heads import HotRoutes, hot_head
from broker.http.messages import Request, parse_query
from broker.link.http_codec import decode_request
from broker.link.proof import link_secret
from broker.membership.zookeeper import access_of, decode_member, encode_member
from broker.security.files import FileUnusable
from broker.security.grants import BadGrantsFile, parse_grants
from broker.security.oidc import BadKeySet, _object, _parts, parse_keys
from broker.security.tokens import BadTokensFile, TokenEntry, format_tokens, hash_of, id_of, parse_tokens
from plainsong.protocol import keys
from plainsong.protocol.cluster import Member, Placement, UnreadablePlacement
from plainsong.protocol.codec import AVRO, AVRO_2, JSON
from plainsong.protocol.codec.cloud_events import decode_events
from plainsong.protocol.codec.media import parse_accept, parse_media_type
from plainsong.protocol.codec.stream import RequestReader, decode_answers, encode_receipt, encode_request, encode_single
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import (
    BadRequest,
    InvalidParameter,
    MalformedTransaction,
    PlainsongError,
    Unauthenticated,
)
from plainsong.protocol.frames import FRAMES_END, decode_attributes, decode_frames
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.link import VOCABULARY, FrameReader
from plainsong.protocol.records import HighWater, Metadata, NamespaceProperties, Reader
from plainsong.protocol.requests import PollRequest, PublishRequest, PublishResponse, Receipt
from plainsong.protocol.rows import decode_row
from plainsong.protocol.tephra.rpc import (
    ApplicationError,
    Call,
    RefusedCall,
    TephraError,
    decode_call,
    decode_reply,
    encode_call,
    encode_result,
)
from plainsong.protocol.tephra.state import (
    ManagerState,
    decode_transaction,
    decode_visibility_state,
    encode_snapshot,
    encode_transaction,
)
from plainsong.protocol.tephra.thrift import MalformedThrift
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.transactions.ledger_rows import ChangeSet, Head, LastPass, Record
from plainsong.protocol.transactions.transaction import Transaction
from plainsong.react.signing import Signer
from storage.backup.files import LocalFiles
from storage.backup.folder import BackupFolder, canonical, sealed
from storage.backup.objects import DamagedObject, decode_rows, encode_row
from storage.base import StoreDamaged, StoreUnusable
from storage.directory import read_format
from storage.inspect.describe import describe
from storage.leveldb.engine.packs import MARK, Pack, packs_of
from storage.leveldb.metadata import decode_entry, encode_entry
from storage.leveldb.volume_list import LIST_NAME, Listed, read_list, write_list
from tests import codecs
from tests.storage.rows_of_all_kinds import rows_about_producers, rows_about_staging, rows_of_all_kinds

ID = bytes(range(20))
FULL = PublishRequest([b"m", b"n"], 3, 5, "p", 1, 2, [7, 8], True, "k", "s", ["a"], [None, 3], [{"k": "v"}, {}])
POLL = PollRequest(ID, False, 5, b"\x01", ID, 10, 20, "committed")
RECEIPT = Receipt(ID, ID, 1, True, True, 4, [4], [5])
RESPONSE = PublishResponse(1, 2, 3, 4, 5)
TRANSACTION = Transaction(9, 10, 11, (1, 5), (7, 8), 7, checkpoint_write_pointers=(11,))
EVENT = b'{"specversion":"1.0","id":"1","source":"/s","type":"t","data":{"a":[1,2.5,null,"x"]},"time":"2026-01-01T00:00:00Z"}'
GRANTS = b"""format = 1
[groups]
payments = ["billing", "cert:ledger.internal"]
[[grant]]
to = ["group:payments", "oidc-group:payments", "*"]
verbs = ["publish", "poll"]
on = ["shop:orders", "shop:audit-*", "service"]
[[quota]]
to = ["group:payments"]
publish_requests_per_s = 500
publish_bytes_per_s = "10 MiB"
"""
KEY_SET = (
    b'{"keys":[{"kty":"EC","crv":"P-256","kid":"a","use":"sig","alg":"ES256",'
    b'"x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"},'
    b'{"kty":"OKP","crv":"Ed25519","kid":"b","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"},'
    b'{"kty":"RSA","kid":"c","n":"0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPFFxuhDR1L6t'
    b'SoWJgYA","e":"AQAB"}]}'
)
#: Header, claims and signature of a token as a provider might sign it.
JWT = (
    b"eyJhbGciOiJFUzI1NiIsImtpZCI6ImEifQ.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUiLCJzdWIiOiJhbm4iLCJleHAiOjF9."
    b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
)
HEAD_BYTES = (
    b"POST /v1/namespaces/shop/topics/orders/publish?ttl=5&longs=string HTTP/1.1\r\nHost: localhost:7420\r\n"
    b"Content-Type: application/json\r\nContent-Length: 17\r\nAuthorization: Bearer x\r\nExpect: 100-continue\r\n\r\n"
)
TOKENS = format_tokens(
    [TokenEntry(id_of(hash_of(name)), name, hash_of(name), 1_700_000_000_000, None) for name in ("ann", "bob")]
)


class Decoder(NamedTuple):
    """One decoder."""

    name: str
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    """The errors it raises for bytes that it refuses; it may raise no others."""
    seeds: Sequence[bytes]
    """Bytes that it accepts, from which hostile ones are made."""


_ROWS = [
    (put.table, put.prefix + suffix, value)
    for put in (*rows_of_all_kinds(), *rows_about_producers(), *rows_about_staging())
    if isinstance(put, Put)
    for suffix, value in zip(put.suffixes, put.values, strict=True)
]
_KEYS = [key for _, key, _ in _ROWS]
_MESSAGES = [value for table, _, value in _ROWS if table is not Table.METADATA]
_VALUES = [value for table, _, value in _ROWS if table is Table.METADATA]


class Files:
    """Gives decoders that take a path a file with the bytes, in a folder of this process."""

    def __init__(self) -> None:
        in_memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(
            prefix="plainsong-fuzz-", dir=in_memory if in_memory.is_dir() else None
        )
        self.folder = Path(self._folder.name)
        self._open: dict[str, tuple[Path, int]] = {}

    def of(self, name: str, data: bytes) -> Path:
        """Return the file of that name, with these bytes."""
        if name not in self._open:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[name] = path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        path, descriptor = self._open[name]
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        return path


FILES = Files()
_WITH_FILES = config_of(
    {
        "cluster.secret_file": str(FILES.of("cluster.secret", b"")),
        "cluster.zookeeper_auth_file": str(FILES.of("auth", b"")),
    }
)
_BACKUP = "20261122T101010Z-0a0b0c"


def _read_secret(data: bytes) -> object:
    FILES.of("cluster.secret", data)
    return link_secret(_WITH_FILES, "a")


def _read_digest(data: bytes) -> object:
    FILES.of("auth", data)
    return access_of(_WITH_FILES.cluster)


def _read_webhook_secrets(data: bytes) -> object:
    return Signer(FILES.of("webhook", data))


def _read_manifest(data: bytes) -> object:
    FILES.of(f"kept/backups/{_BACKUP}.json", data)
    return _FOLDER.manifest(_BACKUP)


_PACKED_PREFIX = b"ns:t:" + bytes(10)
_PACKED_ROWS = [number.to_bytes(4, "big") for number in range(40)]
_PACKS = [
    value
    for values in ([b"\0same length"] * 40, [bytes(number) for number in range(40)])
    for _, value in packs_of(_PACKED_PREFIX, _PACKED_ROWS, values) or ()
]


def _read_pack(data: bytes) -> None:
    if data[:1] != MARK:  # a row that is not packed
        return
    pack = Pack(_PACKED_PREFIX + _PACKED_ROWS[-1], data)
    keys_of_rows = [key for key, _ in pack.rows()]
    if len(keys_of_rows) != pack.count or keys_of_rows[-1] != pack.key:
        raise AssertionError("a pack has different rows from those it declares")
    for key in keys_of_rows[:3]:
        pack.get(key)
    pack.rows(0, pack.index(keys_of_rows[0] + b"x"), values=False)


def _read_list(data: bytes) -> object:
    return read_list(FILES.of(f"list/{LIST_NAME}", data).parent)


def _read_format(data: bytes) -> object:
    return read_format(FILES.of("format/FORMAT", data).parent)


def _written_list() -> bytes:
    folder = FILES.folder / "written"
    folder.mkdir()
    write_list(folder, [Listed(1, "00000001"), Listed(2, "00000002", True)])
    return (folder / LIST_NAME).read_bytes()


_FOLDER = BackupFolder.make(LocalFiles(FILES.folder / "kept"))
_MANIFEST = canonical(sealed({"id": _BACKUP, "format": 1, "topics": [], "complete": True}))


def _read_frames(data: bytes) -> object:
    return FrameReader(1 << 20).feed(data)


def _frame(*parts: object) -> bytes:
    body = VOCABULARY.pack(list(parts))
    return len(body).to_bytes(4, "big") + body


def _read_link_request(data: bytes) -> object:
    value = VOCABULARY.unpack(data)
    if not isinstance(value, list):
        raise ValueError(value)  # links check this first
    return decode_request(value, b"")


def _read_head(data: bytes) -> object:
    return hot_head(data, _OF_LANE)


class _Endpoint(NamedTuple):
    route: Any


_OF_LANE = HotRoutes([_Endpoint(route) for route in ROUTES])  # type: ignore[misc]


def _read_query(data: bytes) -> object:
    return parse_query(data.decode("latin-1"), ("ttl", "longs", "wait_ms"))


def _read_definitions(kind: str, data: bytes) -> object:
    return decode_definitions(Request({}, "", {"content-type": kind}, data))


def _described(table: Table, data: bytes) -> object:
    return describe(table, *_cut(data))


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Split into a key and a value; the first byte is the key's length."""
    size = data[0] if data else 0
    return data[1 : 1 + size], data[1 + size :]


def _joined(table: Table) -> list[bytes]:
    return [bytes([len(key)]) + key + value for each, key, value in _ROWS if each is table]


def _codecs() -> list[Decoder]:
    found = []
    for name, codec, publish in (
        ("avro", AVRO, AVRO.encode_publish(PublishRequest([b"m", b"n"], 3))),
        ("avro 2", AVRO_2, AVRO_2.encode_publish(FULL)),
        ("json", JSON, codecs.JSON.encode_publish(FULL)),
    ):
        for what, seed in (
            ("publish", publish),
            ("poll", codec.encode_poll(POLL if codec is not AVRO else PollRequest(ID, False, 5, b"\x01"))),
            ("rollback", codec.encode_publish_response(RESPONSE)),
            ("publish_response", codec.encode_publish_response(RESPONSE)),
            ("receipt", codec.encode_receipt(RECEIPT)),
        ):
            if hasattr(codec, f"decode_{what}"):
                found.append(Decoder(f"{name} {what}", getattr(codec, f"decode_{what}"), (BadRequest,), [seed]))
    return found


DECODERS = [
    *_codecs(),
    Decoder("event", partial(decode_events, "structured", {}), (BadRequest,), [EVENT]),
    Decoder("events", partial(decode_events, "batch", {}), (BadRequest,), [b"[%s,%s]" % (EVENT, EVENT)]),
    Decoder(
        "stream's requests",
        lambda data: RequestReader().read(data),
        (BadRequest,),
        [encode_single(1, b"x") + encode_single(2, b"y"), encode_request(3, FULL)],
    ),
    Decoder("stream's answers", decode_answers, (BadRequest,), [encode_receipt(1, RECEIPT)]),
    Decoder(
        "definitions in JSON",
        partial(_read_definitions, "application/json"),
        (PlainsongError,),
        [b'{"format":1,"topics":{"a:b":{"ttl":5}}}'],
    ),
    Decoder(
        "definitions in TOML",
        partial(_read_definitions, "application/toml"),
        (PlainsongError,),
        [b'format = 1\n[topics."a:b"]\nttl = 5\n'],
    ),
    Decoder("query", _read_query, (InvalidParameter,), [b"ttl=5&longs=string&wait_ms=%31"]),
    Decoder("head", _read_head, (), [HEAD_BYTES]),
    Decoder(
        "media type",
        lambda data: parse_media_type(data.decode("latin-1")),
        (BadRequest, ValueError),
        [b'application/json; charset="utf-8"; q=0.5'],
    ),
    Decoder(
        "accept",
        lambda data: parse_accept(data.decode("latin-1")),
        (BadRequest, ValueError),
        [b"text/*;q=0.3, application/json;level=1, */*"],
    ),
    Decoder("frames", decode_frames, (ValueError, BadRequest), [ID + b"\0\0\0\1x" + FRAMES_END + b"\0\0\0\1"]),
    Decoder(
        "frames with all",
        partial(decode_frames, pointers=True, attributes=True),
        (ValueError, BadRequest),
        [ID + bytes(8) + b"\0\0\0\1x" + b"\0\0\0\0" + FRAMES_END + b"\0\0\0\1"],
    ),
    Decoder("attributes", decode_attributes, (ValueError, BadRequest), [b"\x81\xa1k\xa1v", bytes(4)]),
    Decoder(
        "link's frames",
        _read_frames,
        (BadRequest,),
        [_frame(1, 2, "http", ["publish", {"a": 1}], b"x", None) + _frame(10, 2, 500) + _frame(12, 7)],
    ),
    Decoder(
        "link's values",
        VOCABULARY.unpack,
        (BadRequest,),
        [VOCABULARY.pack([RECEIPT, FULL, RESPONSE, InvalidParameter("x")])],
    ),
    Decoder(
        "link's requests",
        _read_link_request,
        (ValueError, BadRequest),
        [VOCABULARY.pack(["publish", {"a": "b"}, "", {}, "r", 5, ["n", "token", "c", [], None], "1.2.3.4:5"])],
    ),
    Decoder("Thrift call", decode_call, (RefusedCall, MalformedThrift), [encode_call("startShort", 7)]),
    Decoder(
        "Thrift reply",
        lambda data: decode_reply(data, "startShort", 7),
        (TephraError, ApplicationError, MalformedThrift),
        [encode_result(Call("startShort", 7, ()), TRANSACTION)],
    ),
    Decoder(
        "snapshot of a transaction", decode_transaction, (MalformedTransaction,), [encode_transaction(TRANSACTION)]
    ),
    Decoder(
        "visible state",
        decode_visibility_state,
        (MalformedTransaction,),
        [encode_snapshot(ManagerState(4000, 999, 1002, (5, 300)))],
    ),
    Decoder(
        "placement", Placement.decode, (UnreadablePlacement,), [Placement({"a:b": "c"}, frozenset(("d",))).encode()]
    ),
    Decoder("member", partial(decode_member, "a"), (), [encode_member(Member("a", "h:1", 100, False, 64))]),
    # --- rows ---
    Decoder("message row", decode_row, (DamagedRow,), _MESSAGES),
    Decoder("metadata row", Metadata.decode, (DamagedRow,), _VALUES),
    Decoder("high water row", HighWater.decode, (DamagedRow,), _VALUES),
    Decoder("reader row", Reader.decode, (DamagedRow,), _VALUES),
    Decoder("namespace row", NamespaceProperties.decode, (DamagedRow,), _VALUES),
    Decoder("pointer row", partial(Pending.decode, 5), (DamagedRow,), _VALUES),
    Decoder("producer row", partial(Producer.decode, "p"), (DamagedRow,), _VALUES),
    Decoder("producers row", DeduplicationRecord.decode, (DamagedRow,), _VALUES),
    Decoder("transaction row", partial(Record.decode, 5), (DamagedRow,), _VALUES),
    Decoder("service's head", Head.decode, (DamagedRow,), _VALUES),
    Decoder("change set", partial(ChangeSet.decode, 5), (DamagedRow,), _VALUES),
    Decoder("last pass", LastPass.decode, (DamagedRow,), _VALUES),
    Decoder("message key", keys.parse_message_key, (DamagedRow,), _KEYS),
    Decoder("payload key", keys.parse_payload_key, (DamagedRow,), _KEYS),
    Decoder("system key", keys.parse_system_key, (DamagedRow,), _KEYS),
    *(
        Decoder(
            f"any row of {table.name.lower()}",
            partial(_described, table),
            (),
            _joined(table),
        )
        for table in Table
    ),
    Decoder("journal", decode_entry, (StoreDamaged,), [encode_entry({b"k": b"v", b"gone": None})]),
    Decoder("pack", _read_pack, (plyvel.CorruptionError,), _PACKS),
    Decoder("list of volumes", _read_list, (StoreDamaged,), [_written_list()]),
    Decoder("FORMAT", _read_format, (StoreUnusable,), [b'{"format": 2, "written_by": "0.2"}']),
    Decoder("rows of a backup", decode_rows, (DamagedObject,), [encode_row((b"k", b"v")) + encode_row((b"l", b""))]),
    Decoder("manifest of a backup", _read_manifest, (StoreUnusable,), [_MANIFEST]),
    # --- security ---
    Decoder("tokens file", parse_tokens, (BadTokensFile,), [TOKENS]),
    Decoder("grants file", parse_grants, (BadGrantsFile,), [GRANTS]),
    Decoder("key set", parse_keys, (BadKeySet,), [KEY_SET]),
    Decoder(
        "JSON Web Token", lambda data: _object(_parts(data.decode("latin-1"))[1], "claims"), (Unauthenticated,), [JWT]
    ),
    Decoder("cluster's secret", _read_secret, (FileUnusable,), [b"s" * 40 + b"\n"]),
    Decoder("ZooKeeper's password", _read_digest, (FileUnusable,), [b"digest plainsong:secret\n"]),
    Decoder(
        "secrets of webhooks", _read_webhook_secrets, (InvalidParameter,), [b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n"]
    ),
]
BY_NAME = {decoder.name: decoder for decoder in DECODERS}
assert len(BY_NAME) == len(DECODERS)
