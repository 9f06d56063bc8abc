"""Posts as effects: the request, the meaning of each answer, and limits on the harm that a server can do."""

from __future__ import annotations

import os
import socket
import threading
from base64 import b64encode
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from plainsong.calls import Answer, Failure
from plainsong.messages import Message, Origin
from plainsong.protocol.errors import InvalidParameter
from plainsong.react.post import (
    RETRIED,
    Poster,
    checked_header,
    encoded,
    headers_of,
    place_and_target,
    retry_after_s,
    verdict_of,
)
from plainsong.react.reaction import Done, Reject, Retry
from plainsong.react.signing import Signer
from plainsong.react.stopping import Stop, Stopped
from plainsong.transport.outward import MAX_ANSWER_BYTES, Outward
from tests.ports import free_port

ID = bytes.fromhex("0000018bcfe56805000100000000000000000000")


def message(payload=b"", attributes=None):
    return Message(Origin("orders"), ID, payload, attributes=attributes or {})


class Server(ThreadingHTTPServer):
    """Sends scripted answers, and records the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        #: ``(status, headers, body)`` for the next requests; the last one repeats.
        self.answers = [(200, {}, b"")]
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers, body))
        answers = self.server.answers
        status, headers, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def handle(self):
        with suppress(ConnectionError):  # a client that has read enough disconnects
            super().handle()


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def stop():
    stop = Stop(grace_s=60)
    yield stop
    stop.close()


@pytest.fixture
def poster(stop):
    """Return a function that makes posters."""
    with Outward() as outward:

        def make(url, *, timeout_s=20, **options):
            return Poster(outward, url, "shop", timeout_s=timeout_s, stop=stop, **options)

        yield make


# --- requests ----------------------------------------------------------------------------------------


def test_a_post_carries_payload_id_and_attributes(server, poster):
    attributes = {"routingKey": "ä 1%", "traceparent": "00-ab-cd-01", "bad name": " x "}
    post = poster(f"{server.url}/hook?a=b c&ü", content_type="text/plain", headers=[("X-Mine", "1")])
    assert post(message(b"\0payload", attributes), 2) == Done()
    assert post(message(b""), 1) == Done()
    (path, headers, body), (_, second, _) = server.asked
    assert (path, body) == ("/hook?a=b%20c&%C3%BC", b"\0payload")
    assert headers["Idempotency-Key"] == f"shop:orders:{ID.hex()}" == second["Idempotency-Key"]
    assert headers["Plainsong-Message-Id"] == ID.hex()
    assert headers["Plainsong-Topic"] == "orders"
    assert headers["Plainsong-Namespace"] == "shop"
    assert headers["Plainsong-Publish-Time-Ms"] == "1700000000005"
    assert headers["Plainsong-Attempt"] == "2"
    assert headers["Content-Type"] == "text/plain"
    assert headers["X-Mine"] == "1"
    assert headers["traceparent"] == "00-ab-cd-01"
    assert unquote(headers["Plainsong-Attribute-routingKey"]) == "ä 1%"
    assert unquote(headers["Plainsong-Attribute-bad%20name"]) == " x "
    assert headers["Authorization"] is None
    assert second["traceparent"] is None


@pytest.mark.parametrize("value", ["", "plain", " both ends ", "%41", "a\r\nX-Evil: 1", "\0", "漢字", "tab\there"])
def test_every_value_of_an_attribute_fits_a_header_and_round_trips(value):
    text = encoded(value)
    assert unquote(text) == value
    assert text == text.strip()
    assert text.isascii()
    assert text.isprintable() or not text
    assert all(name.isascii() and "\n" not in name for name, _ in headers_of(message(attributes={value: ""}), "n", 1))


def test_unsafe_trace_headers_are_left_out():
    told = headers_of(message(attributes={"traceparent": "00\r\nEvil: 1"}), "n", 1)
    assert "traceparent" not in dict(told)


def test_headers_of_the_command_line_are_checked():
    assert checked_header("Authorization: Bearer a:b ") == ("Authorization", "Bearer a:b")
    for wrong in ("", "no colon", "bad name: x", "X: ä", "Host: x", "content-length: 1", "Plainsong-Topic: x"):
        with pytest.raises(InvalidParameter):
            checked_header(wrong)
    with pytest.raises(InvalidParameter):
        checked_header("Transfer-Encoding: chunked")


def test_a_url_is_split_into_an_address_and_a_target():
    assert place_and_target("https://h.example") == ("https://h.example", "/")
    assert place_and_target("http://h:81/a%20b/ü?x=%41") == ("http://h:81", "/a%20b/%C3%BC?x=%41")
    for wrong in ("", "ftp://x/", "http://", "http://x:0/", "http://u:p@x/", "http://x/#f", "http://[x/"):
        with pytest.raises(InvalidParameter):
            place_and_target(wrong)


# --- answers -----------------------------------------------------------------------------------------


def test_the_status_decides_the_outcome():
    for status in (200, 201, 202, 204, 299):
        assert verdict_of(Answer(status, {}, b"")) == Done()
    for status in (*RETRIED, 500, 502, 503, 599, 301, 302, 307, 308):
        assert verdict_of(Answer(status, {}, b"")) == Retry(f"status {status}"), status
    for status in (400, 404, 409, 410, 413, 422):
        assert verdict_of(Answer(status, {}, b"no\x1b such\nmore")) == Reject(f"status {status}: no  such")
        assert verdict_of(Answer(status, {}, b""), retry_all=True) == Retry(f"status {status}")
    assert verdict_of(Failure("lost", "gone")) == Retry("gone")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("Thu, 01 Jan 2026 00:00:30 GMT", 30),
        ("Wed, 31 Dec 2025 23:59:59 GMT", 0),
        ("soon", 0),
        ("-1", 0),
        ("9" * 40, 999_999_999),
        ("", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text, seconds):
    assert retry_after_s({"retry-after": text}, datetime(2026, 1, 1, tzinfo=UTC)) == seconds


def test_redirects_are_not_followed_and_are_retried(server, poster):
    server.answers = [(302, {"Location": f"{server.url}/elsewhere"}, b"")]
    assert poster(server.url)(message(), 1) == Retry("status 302")
    assert [path for path, _, _ in server.asked] == ["/"]


def test_proxies_of_the_environment_are_ignored(server, poster, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert os.environ["http_proxy"]
    assert poster(server.url)(message(), 1) == Done()


def test_an_unreachable_server_is_retried(poster):
    assert isinstance(poster(f"http://127.0.0.1:{free_port()}")(message(), 1), Retry)


def test_a_server_that_drips_its_answer_is_given_up_at_the_deadline(poster):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def drip():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not ended.wait(0.05):
                    try:
                        connection.sendall(b"X: y\r\n")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        post = poster(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=2)
        assert post(message(), 1) == Retry("no answer within 2 s")
        ended.set()
        thread.join()


def test_an_endless_answer_is_read_in_part(server, poster):
    server.answers = [(200, {}, b"x" * (40 * MAX_ANSWER_BYTES)), (503, {"Retry-After": "3"}, b"later")]
    post = poster(server.url)
    assert post(message(), 1) == Done()
    assert post(message(), 1) == Retry("status 503: later", 3)


def test_a_post_in_progress_is_given_up_at_the_second_request(poster, stop):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def ask_twice():
            connection, _ = server.accept()
            with connection:
                stop.ask()
                stop.ask()
                while connection.recv(4096):  # until the client disconnects
                    pass

        asking = threading.Thread(target=ask_twice)
        asking.start()
        with pytest.raises(Stopped):
            poster(f"http://127.0.0.1:{server.getsockname()[1]}")(message(), 1)
        asking.join()


def test_a_post_in_progress_may_finish_after_the_first_request(server, poster, stop):
    stop.ask()
    assert poster(server.url)(message(), 1) == Done()


# --- signed posts -------------------------------------------------------------------------------------


#: The secret of the specification's examples.
KNOWN_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_" + b64encode(bytes(range(32))).decode()


@pytest.fixture
def secrets(tmp_path):
    """Return a function that writes a file of secrets, each time as a new file, as rotations do."""
    file = tmp_path / "hook.secret"

    def write(*lines):
        fresh = tmp_path / "fresh"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        os.replace(fresh, file)
        return file

    return write


def verify(asked, secret):
    _, headers, body = asked
    Webhook(secret).verify(body, dict(headers.items()), json_parse=False)


def test_a_signed_post_is_verified_by_an_independent_receiver(server, poster, secrets):
    post = poster(server.url, signer=Signer(secrets(KNOWN_SECRET)))
    assert post(message('{ "sum": 1.10, "of": "ä" }'.encode()), 1) == Done()
    (asked,) = server.asked
    verify(asked, KNOWN_SECRET)
    assert asked[1]["webhook-id"] == f"shop:orders:{ID.hex()}"
    changed = (asked[0], asked[1], asked[2] + b" ")
    with pytest.raises(WebhookVerificationError):
        verify(changed, KNOWN_SECRET)
    with pytest.raises(WebhookVerificationError):
        verify(asked, OTHER_SECRET)


def test_the_signature_of_a_known_message_is_the_known_one(tmp_path):
    file = tmp_path / "secret"
    file.write_text(KNOWN_SECRET)
    signer = Signer(file)
    assert dict(signer.headers_of(message(b'{"test": 2432232314}'), "shop", 1614265330)) == {
        "webhook-id": f"shop:orders:{ID.hex()}",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,PkDkOOG4b2fvIS5AMCV23UxDMxSXHuCF4oQEsdvcfwE=",
    }


def test_during_a_rotation_both_secrets_verify_and_afterwards_the_new_one_alone(server, poster, secrets):
    post = poster(server.url, signer=Signer(secrets(KNOWN_SECRET)))
    assert post(message(b"1"), 1) == Done()
    secrets(KNOWN_SECRET, OTHER_SECRET)
    assert post(message(b"2"), 1) == Done()
    secrets(OTHER_SECRET)
    assert post(message(b"3"), 1) == Done()
    before, during, after = server.asked
    verify(before, KNOWN_SECRET)
    verify(during, KNOWN_SECRET)
    verify(during, OTHER_SECRET)
    verify(after, OTHER_SECRET)
    for asked, secret in ((before, OTHER_SECRET), (after, KNOWN_SECRET)):
        with pytest.raises(WebhookVerificationError):
            verify(asked, secret)


def test_nothing_is_posted_unsigned_while_the_file_is_unusable(server, poster, secrets):
    post = poster(server.url, signer=Signer(secrets(KNOWN_SECRET)))
    file = secrets()
    assert isinstance(post(message(b"1"), 1), Retry)
    file.unlink()
    assert isinstance(post(message(b"1"), 2), Retry)
    assert server.asked == []
    secrets(OTHER_SECRET)
    assert post(message(b"1"), 3) == Done()
    verify(server.asked[0], OTHER_SECRET)


def secret_of(size):
    return "whsec_" + b64encode(bytes(size)).decode()


@pytest.mark.parametrize("size", [24, 64])
def test_secrets_have_24_to_64_bytes_and_their_padding_may_be_left_out(secrets, size):
    Signer(secrets(secret_of(size), secret_of(size).rstrip("="), ""))


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",),
        ("whsec_",),
        ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2L*LaSw",),
        (secret_of(23),),
        (secret_of(65),),
        (KNOWN_SECRET, "whsec_x"),
        (KNOWN_SECRET,) * 3,
        (KNOWN_SECRET, "\n" * 5000),
    ],
)
def test_a_file_that_has_not_one_or_two_secrets_is_refused_without_showing_it(secrets, lines):
    with pytest.raises(InvalidParameter) as refused:
        Signer(secrets(*lines))
    assert all(len(line) < 8 or line not in str(refused.value) for line in lines)


def test_signature_headers_cannot_be_given_next_to_a_secret(server, poster, secrets):
    headers = [("Webhook-Id", "mine")]
    poster(server.url, headers=headers)
    with pytest.raises(InvalidParameter):
        poster(server.url, headers=headers, signer=Signer(secrets(KNOWN_SECRET)))
