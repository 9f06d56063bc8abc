"""Tokens of an OpenID provider: a test server, over real HTTP, that rotates its keys and fails."""

from __future__ import annotations

import hmac
import json
import threading
from base64 import urlsafe_b64encode
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import ECKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry
from trio.testing import wait_all_tasks_blocked
from wsproto.events import AcceptConnection, Request

from broker.config.sections import OidcConfig
from broker.http.websocket import _ROUTE
from broker.security.guard import Hold
from broker.security.oidc import FETCH_TIMEOUT_S, MAX_KNOWN, BadKeySet, OidcProvider, parse_keys
from broker.security.peer import NO_PEER, Peer
from plainsong.protocol.errors import AuthenticationUnavailable, Unauthenticated
from tests.broker.stream_talk import Stream
from tests.patience import PATIENCE_S
from tests.security.named import named

NOW_S = 1_800_000_000
ISSUER, AUDIENCE = "https://login.example", "plainsong"
KEYS = {
    "RS256": RSAKey.generate_key(2048, {"kid": "rsa"}),
    "ES256": ECKey.generate_key("P-256", {"kid": "ec"}),
    "EdDSA": OKPKey.generate_key("Ed25519", {"kid": "ed"}),
}
OTHER = RSAKey.generate_key(2048, {"kid": "rsa"})


def encoded(data):
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(alg="RS256", key=None, header=None, **changes):
    """Return a signed token, leaving out claims that are None."""
    key = KEYS[alg] if key is None else key
    head = {"alg": alg, "kid": key.kid, "typ": "at+jwt", **(header or {})}
    head = {name: value for name, value in head.items() if value is not None}
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "ann",
        "exp": NOW_S + 300,
        "iat": NOW_S,
        "groups": ["ops"],
        **changes,
    }
    claims = {name: value for name, value in claims.items() if value is not None}
    parts = f"{encoded(json.dumps(head).encode())}.{encoded(json.dumps(claims).encode())}"
    return f"{parts}.{encoded(JWSRegistry.algorithms[alg].sign(parts.encode(), key))}"


def published(*keys):
    return json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode()


class Login:
    """The provider: the key set that it publishes, and the number of requests for it."""

    def __init__(self):
        self.body = published(*KEYS.values())
        self.status = 200
        self.asked = 0
        self.url = ""


@contextmanager
def login():
    told = Login()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            told.asked += 1
            self.send_response(told.status)
            if told.status == 302:
                self.send_header("Location", told.url)
            self.send_header("Content-Length", str(len(told.body)))
            self.end_headers()
            self.wfile.write(told.body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        told.url = f"http://127.0.0.1:{server.server_port}/keys"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()


class Now:
    s = float(NOW_S)

    def __call__(self):
        return self.s


@pytest.fixture
def told():
    with login() as provider:
        yield provider


@pytest.fixture
async def provider(told):
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url), now_s=Now())
    assert await made.refresh()
    return made


async def refused(provider, token, peer=NO_PEER):
    with pytest.raises(Unauthenticated) as caught:
        await provider.verify(token, peer)
    assert token not in str(caught.value) + caught.value.challenge
    return caught.value.detail


@pytest.mark.parametrize("alg", KEYS)
async def test_a_token_of_the_provider_names_its_subject_and_groups(provider, alg):
    token = signed(alg)
    assert provider.known(token, NO_PEER) is None
    who = await provider.verify(token, NO_PEER)
    assert (who.name, who.via, who.groups, who.expires_ms) == ("oidc:ann", "oidc", ("ops",), (NOW_S + 360) * 1000)
    assert provider.known(token, NO_PEER) is who
    assert provider.problem_of(who) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"iss": "https://else.example"}, "another issuer"),
        ({"iss": None}, "another issuer"),
        ({"aud": "else"}, "another audience"),
        ({"aud": ["else", 7]}, "another audience"),
        ({"exp": None}, "no expiry"),
        ({"exp": True}, "no expiry"),
        ({"exp": "1900000000"}, "no expiry"),
        ({"exp": NOW_S - 60}, "expired"),
        ({"nbf": NOW_S + 61}, "not valid yet"),
        ({"iat": NOW_S + 61}, "not valid yet"),
        ({"nbf": "x"}, "not valid yet"),
        ({"sub": None}, "is not a name"),
        ({"sub": 17}, "is not a name"),
        ({"sub": "a b"}, "is not a name"),
        ({"sub": "x" * 255}, "is not a name"),
        ({"cnf": {"x5t#S256": "x"}}, "bound to a certificate"),
        ({"cnf": {"jkt": "x"}}, "bound to a certificate"),
        ({"header": {"alg": "none"}}, "not accepted"),
        ({"header": {"alg": "HS256"}}, "not accepted"),
        ({"header": {"alg": "RS512"}}, "not accepted"),
        ({"header": {"crit": ["exp"]}}, "unsupported critical header"),
        ({"header": {"kid": "unknown"}}, "does not publish"),
        ({"header": {"kid": 17}}, "does not publish"),
        ({"header": {"kid": "ec"}}, "does not publish"),
        ({"key": OTHER}, "signature is not valid"),
    ],
)
async def test_a_token_with_any_fault_is_refused(provider, changes, why):
    assert why in await refused(provider, signed(**changes))


async def test_clocks_may_differ_by_the_skew(provider):
    for changes in (
        {"exp": NOW_S - 59},
        {"nbf": NOW_S + 60},
        {"aud": ["x", AUDIENCE]},
        {"groups": "one"},
        {"groups": 5},
    ):
        await provider.verify(signed(**changes), NO_PEER)


async def test_without_a_kid_exactly_one_key_has_to_match(provider, told):
    await provider.verify(signed(header={"kid": None}), NO_PEER)
    told.body = published(KEYS["RS256"], RSAKey.generate_key(2048, {"kid": "second"}))
    await provider.refresh()
    assert "does not publish" in await refused(provider, signed(header={"kid": None}))


async def test_a_token_is_not_verified_by_a_key_that_it_brings(provider):
    for name, value in (
        ("jwk", OTHER.as_dict(private=False)),
        ("jku", "http://127.0.0.1:1/"),
        ("x5u", "http://127.0.0.1:1/"),
    ):
        assert "signature is not valid" in await refused(provider, signed(key=OTHER, header={name: value}))


async def test_a_public_key_is_not_accepted_as_a_secret(provider):
    secret = KEYS["RS256"].as_pem(private=False)
    head, claims = (
        encoded(json.dumps({"alg": "HS256", "kid": "rsa"}).encode()),
        encoded(json.dumps({"iss": ISSUER}).encode()),
    )
    parts = f"{head}.{claims}"
    mac = hmac.digest(secret, parts.encode(), "sha256")
    assert "not accepted" in await refused(provider, f"{parts}.{encoded(mac)}")


async def test_a_bound_token_is_valid_on_the_connection_of_its_certificate_only(provider):
    token = signed(cnf={"x5t#S256": encoded(sha256(b"certificate").digest())})
    assert "bound" in await refused(provider, token)
    assert "bound" in await refused(provider, token, Peer(certificate=b"another"))
    holder = Peer(certificate=b"certificate")
    who = await provider.verify(token, holder)
    assert who.name == "oidc:ann"
    assert provider.known(token, holder) is who
    for thief in (NO_PEER, Peer(certificate=b"another")):
        with pytest.raises(Unauthenticated, match="bound"):
            provider.known(token, thief)


async def test_only_access_tokens_are_accepted_if_configured(told):
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url, require_typ=True), now_s=Now())
    await made.refresh()
    await made.verify(signed(header={"typ": "application/at+jwt"}), NO_PEER)
    assert "typ" in await refused(made, signed(header={"typ": "JWT"}))


# --- keys ------------------------------------------------------------------------------------------


async def test_a_new_key_is_fetched_when_it_is_first_used_and_at_most_once_in_half_a_minute(told):
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url), now_s=Now())
    await made.refresh()
    asked = told.asked
    fresh = RSAKey.generate_key(2048, {"kid": "fresh"})
    told.body = published(*KEYS.values(), fresh)
    await made.verify(signed(key=fresh), NO_PEER)
    assert told.asked == asked + 1
    for _ in range(5):
        await refused(made, signed(header={"kid": "none"}))
    assert told.asked == asked + 1
    made._asked_again_s -= 31
    await refused(made, signed(header={"kid": "none"}))
    assert told.asked == asked + 2


async def test_a_withdrawn_key_invalidates_its_tokens(told):
    changes = []
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url), now_s=Now(), on_change=lambda: changes.append(1))
    await made.refresh()
    token = signed("ES256")
    who = await made.verify(token, NO_PEER)
    told.body = published(KEYS["RS256"])
    await made.refresh()
    assert made.known(token, NO_PEER) is None
    assert isinstance(made.problem_of(who), Unauthenticated)
    assert changes == [1]
    assert "does not publish" in await refused(made, token)


async def test_a_key_that_reuses_the_id_of_another_does_not_verify_its_tokens(told):
    first, second = (RSAKey.generate_key(2048, {"kid": "same"}) for _ in range(2))
    told.body = published(first)
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url), now_s=Now())
    await made.refresh()
    token = signed(key=first)
    who = await made.verify(token, NO_PEER)
    told.body = published(second)
    await made.refresh()
    assert isinstance(made.problem_of(who), Unauthenticated)  # also for a request that has been waiting
    assert made.known(token, NO_PEER) is None
    assert "signature is not valid" in await refused(made, token)


async def test_while_the_provider_is_unavailable_the_last_keys_hold_for_a_while_and_then_tokens_cannot_be_checked(told):
    now, failures = Now(), []
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url, max_stale_s=1000), now_s=now, on_failure=failures.append)
    told.status = 500
    assert not await made.refresh()
    with pytest.raises(AuthenticationUnavailable) as caught:
        await made.verify(signed(), NO_PEER)
    assert caught.value.retry_after_s
    told.status = 200
    assert await made.refresh()
    told.status = 500
    assert not await made.refresh()
    assert failures == ["keys", "keys"]
    now.s += 1000
    await made.verify(signed(exp=NOW_S + 10_000), NO_PEER)
    now.s += 400
    with pytest.raises(AuthenticationUnavailable):
        await made.verify(signed(exp=NOW_S + 10_000), NO_PEER)
    assert made.known(signed(exp=NOW_S + 10_000), NO_PEER) is None
    told.status = 200
    await made.refresh()
    await made.verify(signed(exp=NOW_S + 10_000), NO_PEER)


async def test_a_token_that_arrives_during_the_first_fetch_of_keys_waits_for_them(told):
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url), now_s=Now())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.verify, signed(), NO_PEER)
        await wait_all_tasks_blocked()
        assert await made.refresh()


async def test_a_token_waits_for_the_first_keys_for_a_bounded_time(told, autojump_clock):
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, told.url), now_s=Now())
    started_s = trio.current_time()
    with pytest.raises(AuthenticationUnavailable):
        await made.verify(signed(), NO_PEER)
    assert trio.current_time() == started_s + FETCH_TIMEOUT_S


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "AAAA"}]}', b"x" * (1 << 20) + b"xx"]
)
async def test_an_invalid_key_set_replaces_none(told, provider, body):
    told.body = body
    assert not await provider.refresh()
    await provider.verify(signed(), NO_PEER)


async def test_a_redirect_is_not_followed(told, provider):
    told.status = 302
    asked = told.asked
    assert not await provider.refresh()
    assert told.asked == asked + 1


async def test_keys_may_be_in_a_file(tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(published(KEYS["ES256"]))
    path.chmod(0o600)
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, str(path)), now_s=Now())
    assert await made.refresh()
    await made.verify(signed("ES256"), NO_PEER)


@pytest.mark.parametrize("before", ["keys", "no file", "no keys"])
async def test_a_change_of_the_file_of_keys_right_after_it_was_read_is_noticed(tmp_path, before):
    path = tmp_path / "keys.json"
    if before != "no file":
        path.write_bytes(published(KEYS["ES256"]) if before == "keys" else b"{")
        path.chmod(0o600)
    made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, str(path)), now_s=Now())
    assert await made.refresh() is (before == "keys")
    path.write_bytes(published(*KEYS.values()))
    path.chmod(0o600)
    assert not await made._stands()
    assert await made.refresh()
    assert await made._stands()


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.dictionaries(
            st.sampled_from(["keys", "kty", "n", "e", "crv", "x", "y", "kid", "alg"]),
            inner | st.lists(inner, max_size=3),
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_of_a_key_set_are_read_or_refused(data):
    with suppress(BadKeySet):
        assert parse_keys(data)


PARSED = parse_keys(published(*KEYS.values()))


@given(st.text("eyJ0.-_=aZ9", max_size=60), st.sampled_from(["{0}", "{0}.{0}.{0}", "eyJhbGciOiJSUzI1NiJ9.{0}.{0}"]))
def test_any_text_of_a_token_is_read_or_refused(text, form):
    async def ask():
        made = OidcProvider(OidcConfig(ISSUER, AUDIENCE, "nowhere"), now_s=Now())
        made._put(PARSED)
        made._tried.set()  # otherwise each waits for the first fetch
        made.fetched_s = NOW_S
        with pytest.raises(Unauthenticated):
            await made.verify(form.format(text), NO_PEER)

    trio.run(ask)


async def test_cached_tokens_are_bounded(provider):
    who = await provider.verify(signed(), NO_PEER)
    for number in range(MAX_KNOWN):
        provider._known[number.to_bytes(32, "big")] = who, "rsa", None
    await provider.verify(signed(sub="bob"), NO_PEER)
    assert len(provider._known) == MAX_KNOWN


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_a_daemon_accepts_names_of_the_provider_and_grants_by_their_groups(tmp_path, told, listener):
    settings = {
        "security__oidc.issuer": ISSUER,
        "security__oidc.audience": AUDIENCE,
        "security__oidc.jwks": told.url,
    }
    async with named(tmp_path, listener=listener, **settings) as daemon:
        await daemon.ask("operator", "PUT", "/v1/namespaces/ns/topics/a", json={})
        grant = '[[grant]]\nto = ["oidc-group:ops"]\nverbs = ["publish"]\non = ["ns:a"]\n'
        daemon.files.grant(daemon.files.grants_path.read_text() + grant)
        await daemon.reload()
        security = daemon.daemon.service.security
        security.provider._now_s = Now()
        path, body = "/v1/namespaces/ns/topics/a/publish", {"messages": ["m"]}

        async def publish(token):
            headers = {"Authorization": f"Bearer {token}"}
            return await daemon.daemon.http.post(path, json=body, headers=headers)

        answer = await publish(signed())
        assert (answer.status_code, answer.json()["code"]) == (503, "authentication_unavailable")
        assert "retry-after" in answer.headers
        assert (await daemon.ask("writer", "POST", path, json=body)).status_code == 200  # our own tokens still work
        await security.provider.refresh()
        for _ in range(2):
            assert (await publish(signed(exp=4_000_000_000))).status_code == 200
        assert (await publish(signed(groups=["others"], exp=4_000_000_000))).status_code == 403
        assert (await publish(signed(key=OTHER))).status_code == 401


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_an_expired_token_is_refused_on_the_connection_that_it_opened_and_ends_its_waits(
    tmp_path, told, listener
):
    settings = {"security__oidc.issuer": ISSUER, "security__oidc.audience": AUDIENCE, "security__oidc.jwks": told.url}
    now, headers, path = Now(), {"Authorization": f"Bearer {signed()}"}, "/v1/namespaces/ns/topics/a"
    async with named(tmp_path, listener=listener, **settings) as daemon:
        await daemon.ask("operator", "PUT", path, json={})
        daemon.files.grant('format = 1\n[[grant]]\nto = ["oidc:ann"]\nverbs = ["publish", "poll"]\non = ["ns:a"]\n')
        await daemon.reload()
        security, http = daemon.daemon.service.security, daemon.daemon.http
        guard, security.provider._now_s = security.guard, now
        guard._now_ms = lambda: round(now.s * 1000)
        await security.provider.refresh()

        async def publish():
            return (await http.post(f"{path}/publish", json={"messages": ["m"]}, headers=headers)).status_code

        async def poll():
            body = {"waitMs": 30000, "startFrom": 4_000_000_000_000}
            waited.append(await http.post(f"{path}/poll", json=body, headers=headers))

        waited = []
        assert [await publish() for _ in range(3)] == [200, 200, 200]
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poll)
                while not guard.holds:  # noqa: ASYNC110 - the daemon sends no notification
                    await trio.sleep(0.005)
                now.s += 300 + 59
                guard.expire_ended()
                assert await publish() == 200
                now.s += 2
                guard.expire_ended()
        assert (waited[0].status_code, waited[0].json()["detail"]) == (401, "the token has expired")
        assert await publish() == 401
        assert guard.holds == 0


@pytest.mark.parametrize("listener", ["hot", "application"])
@pytest.mark.parametrize(
    ("change", "status"), [("replaced", 401), ("stale", 503)], ids=["key-replaced", "keys-too-old"]
)
async def test_requests_that_would_be_refused_now_end_on_kept_connections_too(tmp_path, told, listener, change, status):
    first, second = (RSAKey.generate_key(2048, {"kid": "same"}) for _ in range(2))
    told.body = published(first)
    settings = {"security__oidc.issuer": ISSUER, "security__oidc.audience": AUDIENCE, "security__oidc.jwks": told.url}
    now, path = Now(), "/v1/namespaces/ns/topics/a"
    headers = {"Authorization": f"Bearer {signed(key=first, exp=NOW_S + 10**9)}"}
    async with named(tmp_path, listener=listener, **settings) as daemon:
        await daemon.ask("operator", "PUT", path, json={})
        daemon.files.grant('format = 1\n[[grant]]\nto = ["oidc:ann"]\nverbs = ["publish", "poll"]\non = ["ns:a"]\n')
        await daemon.reload()
        security, http = daemon.daemon.service.security, daemon.daemon.http
        guard, security.provider._now_s = security.guard, now
        guard._now_ms = lambda: round(now.s * 1000)
        await security.provider.refresh()

        async def publish():
            return (await http.post(f"{path}/publish", json={"messages": ["m"]}, headers=headers)).status_code

        async def poll():
            body = {"waitMs": 30000, "startFrom": 4_000_000_000_000}
            waited.append((await http.post(f"{path}/poll", json=body, headers=headers)).status_code)

        async def follow():
            async with http.stream("GET", f"{path}/events", headers=headers) as answer:
                follows.set()
                told_of.append((await answer.aread()).decode())

        host, _, port = str(http.base_url).rpartition("//")[2].rstrip("/").partition(":")
        waited, told_of, follows = [], [], trio.Event()
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream(host, int(port)) as socket, trio.open_nursery() as nursery:
                assert [await publish() for _ in range(2)] == [200, 200]
                stream = Stream(socket)
                await stream.say(
                    Request(host=f"{host}:{port}", target=f"{path}/stream", extra_headers=[*_raw(headers)])
                )
                assert isinstance(await stream.event(), AcceptConnection)
                nursery.start_soon(poll)
                nursery.start_soon(follow)
                await follows.wait()
                while guard.holds < 3:  # noqa: ASYNC110 - the daemon does not say when
                    await trio.sleep(0.005)
                if change == "replaced":
                    told.body = published(second)
                    await security.provider.refresh()
                else:
                    now.s += OidcConfig().max_stale_s + OidcConfig().refresh_s + 1
                    guard.expire_ended()
                assert (await stream.closed())[0] == {401: 1008, 503: 1013}[status]
            assert waited == [status]
            assert "event: error" in told_of[0]
        assert [await publish() for _ in range(2)] == [status, status]
        assert guard.holds == 0


def _raw(headers):
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


async def test_a_token_whose_end_no_date_can_express_is_valid(tmp_path, told):
    settings = {"security__oidc.issuer": ISSUER, "security__oidc.audience": AUDIENCE, "security__oidc.jwks": told.url}
    async with named(tmp_path, **settings) as daemon:
        provider = daemon.daemon.service.security.provider
        provider._now_s = Now()
        await provider.refresh()
        headers = {"Authorization": f"Bearer {signed(exp=(1 << 53) - 1)}"}
        answer = await daemon.daemon.http.get("/v1/whoami", headers=headers)
        assert (answer.status_code, answer.json()["expires"]) == (200, "9999-12-31T23:59:59Z")


async def test_a_wait_is_checked_when_it_begins(tmp_path):
    async with named(tmp_path) as daemon:
        guard = daemon.daemon.service.security.guard
        admission = guard.admit_now({k.lower(): v for k, v in daemon.files.header("writer").items()}, NO_PEER)
        daemon.files.change("writer", revoked_ms=1)
        await daemon.reload()
        ended = []
        hold = Hold(guard, admission.who, _ROUTE, {"namespace": "ns", "topic": "a"}, ended.append)
        with guard.holding(hold):
            assert [each.code for each in ended] == ["unauthenticated"]
