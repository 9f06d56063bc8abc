"""Extreme values written through each protocol, and read through every other protocol after a restart."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import trio
from wsproto.events import AcceptConnection, Request

from plainsong import Client
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES, MAX_TTL_S, PollRequest, PublishRequest
from plainsong.protocol.tephra.rpc import decode_reply, encode_call
from plainsong.protocol.tephra.thrift import ThriftFrames, framed
from tests.broker.stream_talk import Stream, request
from tests.codecs import AVRO_2
from tests.daemon.harness import Daemon, clean_environ, run_plainsong
from tests.patience import PATIENCE_S
from tests.ports import free_port

LONG = 255
#: With default settings a request's largest payload is 8 MiB; this one also fits as base64.
LARGE = bytes(range(256)) * (16 << 10)
ATTRIBUTES: list[dict[str, str]] = [
    {},
    {"k": ""},
    {"k": "v" * (MAX_ATTRIBUTE_BYTES - 1)},
    {"a" * MAX_ATTRIBUTE_BYTES: ""},
    {"\xe9": "\U0001f600"},
]
#: Values by the length of the names. Names can interfere with attributes, which are in the same headers or command line,
#: but not with payloads.
VALUES = {
    1: [*product((b"", b"\0", b"\xff\xfe"), ATTRIBUTES), (LARGE, {})],
    LONG: list(product((b"\xff\xfe",), ATTRIBUTES)),
}
Values = Sequence[tuple[bytes, dict[str, str]]]
JSON = {"Content-Type": "application/json"}
AVRO = {"Content-Type": "avro/binary;version=2", "Accept": "avro/binary;version=2"}


def url_of(daemon: Daemon) -> str:
    return "http://{}:{}".format(*daemon.address)


def path_of(namespace: str, topic: str) -> str:
    return f"/v1/namespaces/{namespace}/topics/{topic}"


def http(daemon: Daemon, *, http2: bool = False) -> httpx.Client:
    # ``verify=False``: there is no TLS here, and loading the system's certificates takes tens of milliseconds.
    return httpx.Client(
        base_url=url_of(daemon), http1=not http2, http2=http2, trust_env=False, verify=False, timeout=PATIENCE_S
    )


def encoded(payload: bytes) -> Any:
    return {"base64": base64.b64encode(payload).decode()}


def decoded(shown: Any) -> bytes:
    return shown.encode() if isinstance(shown, str) else base64.b64decode(shown["base64"])


def body_of(payload: bytes, attributes: dict[str, str]) -> dict[str, Any]:
    return {"messages": [encoded(payload)], "attributes": [attributes], "ttlSeconds": MAX_TTL_S}


# --- writing -------------------------------------------------------------------------------------------


def by_http1(daemon: Daemon, namespace: str, topic: str, values: Values, *, http2: bool = False) -> None:
    with http(daemon, http2=http2) as client:
        for payload, attributes in values:
            answer = client.post(f"{path_of(namespace, topic)}/publish", json=body_of(payload, attributes))
            assert answer.status_code == 200, answer.text
            assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")


def by_http2(daemon: Daemon, namespace: str, topic: str, values: Values) -> None:
    by_http1(daemon, namespace, topic, values, http2=True)


def by_avro(daemon: Daemon, namespace: str, topic: str, values: Values) -> None:
    with http(daemon) as client:
        for payload, attributes in values:
            body = AVRO_2.encode_publish(PublishRequest([payload], ttl_s=MAX_TTL_S, attributes=[attributes]))
            answer = client.post(f"{path_of(namespace, topic)}/publish", content=body, headers=AVRO)
            assert answer.status_code == 200, answer.text


def by_websocket(daemon: Daemon, namespace: str, topic: str, values: Values) -> None:
    async def talk() -> None:
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream(*daemon.address) as socket:
                stream = Stream(socket)
                await stream.say(Request(host="localhost", target=f"{path_of(namespace, topic)}/stream"))
                assert isinstance(await stream.event(), AcceptConnection)
                for number, (payload, attributes) in enumerate(values):
                    await stream.send(request(number, payload, attributes=[attributes], ttlSeconds=MAX_TTL_S))
                    (answer,) = await stream.answers(1)
                    assert answer[:2] == [number, 200], answer

    trio.run(talk)


def by_command_line(daemon: Daemon, namespace: str, topic: str, values: Values) -> None:
    for payload, attributes in values:
        if payload is LARGE:  # does not fit on a command line
            by_client(daemon, namespace, topic, [(payload, attributes)])
            continue
        words = [f"--attribute={name}={value}" for name, value in attributes.items()]
        text = base64.b64encode(payload).decode()
        done = run_plainsong(
            *("publish", topic, "--url", url_of(daemon), "--namespace", namespace, "--base64"),
            *(*words, f"--ttl={MAX_TTL_S}s", "--", text),
            environ=clean_environ(),
        )
        assert done.returncode == 0, done.stderr


def by_client(daemon: Daemon, namespace: str, topic: str, values: Values) -> None:
    with Client(url_of(daemon), namespace=namespace) as client:
        for payload, attributes in values:
            client.publish(topic, payload, attributes=attributes, ttl_s=MAX_TTL_S)


# --- reading -------------------------------------------------------------------------------------------


def read_by_http1(daemon: Daemon, namespace: str, topic: str, *, http2: bool = False) -> Any:
    found: list[Any] = []
    with http(daemon, http2=http2) as client:
        path, body = f"{path_of(namespace, topic)}/poll?payload=base64", dict[str, Any]()
        while page := client.post(path, json=body).raise_for_status().json():
            found += [(decoded(each["payload"]), each.get("attributes", {})) for each in page]
            body |= {"startFrom": page[-1]["id"], "inclusive": False}
    return found


def read_by_http2(daemon: Daemon, namespace: str, topic: str) -> Any:
    return read_by_http1(daemon, namespace, topic, http2=True)


def read_by_avro(daemon: Daemon, namespace: str, topic: str) -> Any:
    with http(daemon) as client:
        body = AVRO_2.encode_poll(PollRequest())
        answer = client.post(f"{path_of(namespace, topic)}/poll", content=body, headers=AVRO)
        return [(each.payload, dict(each.attributes or {})) for each in AVRO_2.decode_page(answer.content)]


def read_by_client(daemon: Daemon, namespace: str, topic: str) -> Any:
    with Client(url_of(daemon), namespace=namespace) as client:
        return [(message.payload, dict(message.attributes)) for message in client.read(topic)]


def read_by_command_line(daemon: Daemon, namespace: str, topic: str) -> Any:
    done = run_plainsong(
        *("poll", topic, "--url", url_of(daemon), "--namespace", namespace, "--json"), environ=clean_environ()
    )
    assert done.returncode == 0, done.stderr
    return [
        (decoded(each["payload"]), each.get("attributes", {})) for each in map(json.loads, done.stdout.splitlines())
    ]


WRITERS = [by_http1, by_http2, by_avro, by_websocket, by_command_line, by_client]
READERS = [read_by_http1, read_by_http2, read_by_avro, read_by_client, read_by_command_line]


@pytest.mark.parametrize("size", [1, LONG])
def test_values_stored_through_a_protocol_are_read_through_every_other_after_a_restart(
    size: int, daemon: Callable[..., Daemon]
):
    namespace, properties = "n" * size, {"ttl": str(MAX_TTL_S), "max_bytes": str((1 << 63) - 1)}
    topics = {f"{chr(ord('a') + number) * size}": writer for number, writer in enumerate(WRITERS)}
    first = daemon()
    with http(first) as client:
        for topic, write in topics.items():
            client.put(path_of(namespace, topic), json=properties).raise_for_status()
            write(first, namespace, topic, VALUES[size])
    first.stop()
    second = daemon()
    with http(second) as client:
        for topic in topics:
            shown = client.get(path_of(namespace, topic)).json()["properties"]
            assert shown.items() >= properties.items()
            for read in READERS:
                assert read(second, namespace, topic) == VALUES[size], (topics[topic].__name__, read.__name__)


@pytest.mark.parametrize("client_id", ["c", "c" * 256, "\xe9" * 128])
def test_a_transaction_begun_by_thrift_is_shown_by_every_protocol_after_a_restart(
    client_id: str, daemon: Callable[..., Daemon]
):
    port = free_port()
    settings = "transactions.service=embedded", f"transactions.thrift=127.0.0.1:{port}"
    first = daemon(*settings)

    async def call(method: str, *args: Any) -> Any:
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                frames = ThriftFrames()
                await stream.send_all(framed(encode_call(method, 1, *args)))
                while (message := frames.take()) is None:
                    frames.feed(await stream.receive_some())
                return decode_reply(message, method, 1)

    begun = trio.run(call, "startShortWithClientIdAndTimeOut", client_id, 300)
    first.stop()
    second = daemon(*settings)
    for http2 in (False, True):
        with http(second, http2=http2) as client:
            shown = client.get(f"/v1/transactions/{quote(str(begun.transaction_id))}").raise_for_status().json()
            assert (shown["clientId"], shown["state"]) == (client_id, "in_progress")
    done = run_plainsong("tx", "list", "--json", "--url", url_of(second), environ=clean_environ())
    assert client_id in done.stdout
    trio.run(call, "abortTx", begun)
