"""Pages of other origins, and pages that reach the daemon by a host name of their own, cannot use it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import trio
from broker_in_process import TOPICS, in_process

from broker.config import ConfigError, load_config
from broker.http.origin_check import OriginCheck, origin_check
from broker.security.peer import NO_PEER, Peer, UnixPeer
from tests.broker.listeners import Reader, post, running

OPEN = "/v1/transactions"
FORM = "application/x-www-form-urlencoded"


@pytest.fixture(params=["hot", "application"])
async def daemon(request):
    values = {"security.allowed_hosts": "queue.example", "security.allowed_origins": "https://tools.example:8443"}
    async with in_process(listener=request.param, **values) as running_daemon:
        await running_daemon.create()
        yield running_daemon


async def begun_transactions(daemon) -> int:
    return len((await daemon.call("GET", OPEN)).json())


# --- Host ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:7420",
        "10.1.2.3",
        "[::1]:7420",
        "[fe80::1%25eth0]",
        "localhost",
        "LocalHost.:80",
        "a.localhost",
        "b.a.localhost:1",
        "queue.example",
        "Queue.Example.:7420",
        "x.wide.example",
        "y.x.wide.example",
        "served.example",
        "one.card.example",
    ],
)
def test_host_may_be_an_address_localhost_or_a_name_of_the_daemon(host):
    check = OriginCheck(["queue.example.", "*.Wide.example"])
    check.certificate_names = frozenset({"served.example", "*.card.example"})
    assert check.refusal("POST", {"host": host}, NO_PEER) is None
    assert check.is_clear({"host": host}, NO_PEER)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "xlocalhost",
        ".localhost",
        "wide.example",
        "queue.example.evil.example",
        "two.one.card.example",
        "2130706433",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "rebound.10.0.0.1.nip.example",
    ],
)
def test_every_other_name_is_forbidden_with_the_setting_that_allows_it(host):
    check = OriginCheck(["queue.example.", "*.wide.example"])
    check.certificate_names = frozenset({"*.card.example"})
    refusal = check.refusal("GET", {"host": f"{host}:7420"}, NO_PEER)
    assert refusal is not None
    assert (refusal.code, refusal.hint) == ("forbidden", f"add {host} to security.allowed_hosts")
    assert not check.is_clear({"host": host}, NO_PEER)


@pytest.mark.parametrize("host", ["", "a b", "a,b", "a/b", "user@a", "[::1", "a:b", "a:123456", "ä"])
def test_an_invalid_host_is_a_bad_request(host):
    refusal = OriginCheck().refusal("GET", {"host": host}, NO_PEER)
    assert refusal is not None
    assert refusal.code == "invalid_parameter"


def test_a_unix_socket_may_be_addressed_by_any_name():
    peer = Peer("unix", unix=UnixPeer(1, 2, 3))
    assert OriginCheck().refusal("POST", {"host": "anything.example"}, peer) is None


def test_the_settings_name_the_hosts_and_origins():
    values = {
        "security.allowed_hosts": "a.example, *.b.example",
        "http.bind": "bound.example:7420",
        "cluster.advertise": "known.example:7420",
        "security.allowed_origins": "https://a.example",
    }
    check = origin_check(load_config(None, {}, values).config)
    for name in ("a.example", "x.b.example", "bound.example", "known.example"):
        assert check.allows_name(name), name
    assert not check.allows_name("b.example")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("origins", "*"),
        ("origins", "https://*.example"),
        ("origins", "a.example"),
        ("origins", "https://a.example/"),
        ("hosts", "*"),
        ("hosts", "a.*.example"),
        ("hosts", "http://a.example"),
        ("hosts", "a.example,"),
    ],
)
def test_wildcards_for_everything_and_urls_are_refused_at_the_start(name, value):
    with pytest.raises(ConfigError):
        load_config(None, {}, {f"security.allowed_{name}": value})


@pytest.mark.parametrize("path", [f"{TOPICS}/t/publish", f"{TOPICS}/t/poll", OPEN, f"{OPEN}/truncate"])
async def test_a_rebound_name_reaches_nothing(daemon, path):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
        answer = await daemon.http.post(path, json={}, headers={"host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert answer.json()["outcome"] == "not-applied"
        reading = await daemon.http.get(f"{TOPICS}/t", headers={"host": host})
        assert reading.status_code == 403
    assert await begun_transactions(daemon) == 0
    assert (await daemon.http.get(f"{TOPICS}/t", headers={"host": "queue.example"})).status_code == 200


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])
@pytest.mark.parametrize("path", ["t/store", "/nothing/here"])
async def test_a_request_without_host_is_400(hot, path):
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post(path, b"x").replace(b"Host: localhost\r\n", b""))
        assert (await Reader(stream).reply()).status == 400


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])
async def test_every_request_on_a_connection_is_checked(hot):
    async with running(hot=hot) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        good, bad = post("t/store", b"x"), post("t/store", b"x").replace(b"localhost", b"evil.example")
        statuses = []
        for request in (good, good, bad):
            await stream.send_all(request)
            statuses.append((await reader.reply()).status)
        assert statuses == [200, 200, 403]
        assert await reader.at_end()
        assert len(listener.toys.peers) == 2


# --- Origin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://[::1"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "https://tools.example"},
        {"origin": "https://tools.example:8443.evil.example"},
        {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_form_of_another_site_begins_no_transaction(daemon, headers):
    sent = {"content-type": FORM, "accept": "text/html", "upgrade-insecure-requests": "1", **headers}
    for path in (OPEN, f"{OPEN}/truncate", f"{TOPICS}/t/publish"):
        answer = await daemon.http.post(path, content=b"timeoutSeconds=1", headers=sent)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert "access-control-allow-origin" not in answer.headers
    for method in ("PUT", "DELETE"):
        assert (await daemon.http.request(method, f"{TOPICS}/t", headers=headers)).status_code == 403
    assert await begun_transactions(daemon) == 0
    assert (await daemon.http.get(f"{TOPICS}/t", headers=headers)).status_code == 200
    assert await daemon.poll() == []


async def test_pages_of_the_daemon_itself_may_do_everything(daemon):
    own = str(daemon.http.base_url).rstrip("/")
    for headers in (
        {"origin": own},
        {"origin": own, "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ):
        answer = await daemon.http.post(f"{TOPICS}/t/publish", json={"messages": ["m"]}, headers=headers)
        assert answer.status_code == 200, headers
        assert "access-control-allow-origin" not in answer.headers
    assert len(await daemon.poll()) == 4


def test_an_origin_is_compared_by_scheme_host_and_port():
    check = OriginCheck(["q.example"])

    def passes(origin: str, host: str, peer: Peer) -> bool:
        return check.refusal("POST", {"host": host, "origin": origin}, peer) is None

    plain, tls, unix = NO_PEER, replace(NO_PEER, tls=True), replace(NO_PEER, unix=UnixPeer(1, 2, 3))
    assert passes("http://q.example", "q.example:80", plain)
    assert passes("https://Q.example:443", "q.example", tls)
    assert passes("https://q.example", "q.example", unix)  # a proxy is in front of it
    assert not passes("https://q.example", "q.example", plain)
    assert not passes("http://q.example", "q.example", tls)
    assert not passes("http://q.example:81", "q.example", plain)


def test_a_get_is_refused_only_where_it_becomes_a_stream():
    check = OriginCheck()
    headers = {"host": "localhost", "origin": "https://evil.example"}
    for method in ("GET", "HEAD", "OPTIONS"):
        assert check.refusal(method, headers, NO_PEER) is None
    assert check.refusal("GET", headers, NO_PEER, streams=True) is not None


async def test_events_are_not_shown_to_pages_of_other_origins():
    async with running() as listener:
        for origin, status in (("https://evil.example", 403), (f"http://127.0.0.1:{listener.port}", 200)):
            async with await listener.connect() as stream:
                head = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{listener.port}\r\nOrigin: {origin}\r\n\r\n"
                await stream.send_all(head.encode())
                reply = await Reader(stream).reply()
                assert (reply.status, b"secret" in reply.body) == (status, status == 200)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://[::1", "null", "\xff", "https://a, https://b"])
async def test_no_page_of_another_origin_opens_a_stream(daemon, origin):
    url = daemon.http.base_url
    async with await trio.open_tcp_stream(url.host, url.port) as stream:
        lines = [f"GET {TOPICS}/t/stream HTTP/1.1", f"Host: {url.host}:{url.port}", f"Origin: {origin}"]
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: AQIDBAUGBwgJCgsMDQ4PEA=="]
        await stream.send_all(("\r\n".join([*lines, "Sec-WebSocket-Version: 13"]) + "\r\n\r\n").encode("latin-1"))
        reply = await Reader(stream).reply()
        assert (reply.status, reply.code) == (403, "forbidden")


# --- CORS ------------------------------------------------------------------------------------------


async def test_without_the_setting_there_is_no_cors():
    async with in_process(listener="hot") as daemon:
        await daemon.create()
        answer = await daemon.http.get(f"{TOPICS}/t", headers={"origin": "https://tools.example:8443"})
        asked = {"origin": "https://tools.example:8443", "access-control-request-method": "POST"}
        preflight = await daemon.http.options(f"{TOPICS}/t/publish", headers=asked)
    for each in (answer, preflight):
        assert not [name for name in each.headers if name.startswith("access-control")]


async def test_pages_of_an_allowed_origin_may_send_and_read(daemon):
    origin = {"origin": "https://tools.example:8443", "sec-fetch-site": "cross-site"}
    published = await daemon.http.post(f"{TOPICS}/t/publish", json={"messages": ["m"]}, headers=origin)
    assert published.status_code == 200
    polled = await daemon.http.post(f"{TOPICS}/t/poll", json={}, headers=origin)
    assert [message["payload"] for message in polled.json()] == ["m"]
    missing = await daemon.http.get(f"{TOPICS}/missing", headers=origin)
    for answer in (published, polled, missing):
        assert answer.headers["access-control-allow-origin"] == "https://tools.example:8443"
        assert "Origin" in answer.headers.get_list("vary", split_commas=True)
        assert "access-control-allow-credentials" not in answer.headers
    exposed = polled.headers["access-control-expose-headers"].split(", ")
    assert {name for name in polled.headers if name.startswith("plainsong-")} <= {name.lower() for name in exposed}
    assert {"Retry-After", "X-Request-Id", "RateLimit", "RateLimit-Policy"} < set(exposed)


async def test_a_preflight_names_the_methods_of_the_path(daemon):
    asked = {"origin": "https://tools.example:8443", "access-control-request-method": "PUT"}
    answer = await daemon.http.options(f"{TOPICS}/t", headers=asked)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-methods"] == answer.headers["allow"]
    assert {"DELETE", "GET", "PUT"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    wanted = "authorization, content-type, accept, last-event-id, traceparent, prefer"
    assert answer.headers["access-control-allow-headers"] == wanted
    assert answer.headers["access-control-max-age"] == "600"
    foreign = await daemon.http.options(f"{TOPICS}/t", headers={**asked, "origin": "https://evil.example"})
    assert not [name for name in foreign.headers if name.startswith("access-control")]


async def test_a_refusal_is_logged_with_its_origin(daemon):
    check, heard = OriginCheck(), []
    check.on_refused = lambda what, peer, error: heard.append((what, peer.address, error.code))
    peer = Peer("10.0.0.7:1")
    check.refusal("POST", {"host": "evil.example"}, peer)
    check.refusal("POST", {"host": "localhost", "origin": "null"}, peer)
    assert heard == [("host", "10.0.0.7:1", "forbidden"), ("origin", "10.0.0.7:1", "forbidden")]
    assert json.loads((await daemon.http.post(OPEN, headers={"origin": "null"})).content)["status"] == 403
