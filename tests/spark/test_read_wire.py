"""The connector's HTTP client, against a server that does what each test says."""

from __future__ import annotations

import json
import pickle
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pyspark_plainsong.calls import Calls
from pyspark_plainsong.wire import BrokerError, Wire
from tests.certificates import Authority
from tests.ports import free_port

END = b"\xff" * 20
#: Status and body. With None for the status, the server announces a longer body than it sends, and hangs up. With None
#: for both, it hangs up at once.
Reply = tuple[int | None, bytes | None]


class Server:
    """Answers requests with ``replies``, in turn, and the last of them forever."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.requests.append((self.command, self.path, dict(self.headers.items()), body))
                status, answer = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response(status or 200)
                self.send_header("Content-Length", str(len(answer) + (100 if status is None else 0)))
                self.end_headers()
                self.wfile.write(answer)
                self.close_connection = status is None

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def make(*urls: str, **options: Any) -> Wire:
        made.append(Wire(urls, **{"retries": 2, "retry_interval_s": 0.0, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def problem(status: int, code: str, outcome: str = "not-applied") -> Reply:
    return status, json.dumps({"code": code, "detail": "why", "hint": "how", "outcome": outcome}).encode()


def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_a_truncated_body_is_requested_again(wire):
    with Server((None, b"half"), (200, b"whole")) as server:
        assert wire(server.url).ask("POST", "/x", b"{}").body == b"whole"
        assert len(server.requests) == 2


def test_frames_without_their_end_are_requested_again_and_never_the_end_of_a_topic(wire):
    whole = END + b"\0\0\0\0"
    with Server((200, whole[:-5]), (200, whole)) as server:
        page = Calls(wire(server.url), "n").poll_frames(
            "t", start=bytes(20), end_before=END, limit=1, isolation="committed"
        )
        assert (page.body, len(server.requests)) == (whole, 2)
    with Server((200, b"")) as server, pytest.raises(BrokerError, match="ended early, after 0 bytes"):
        Calls(wire(server.url), "n").poll_frames("t", start=bytes(20), end_before=END, limit=1, isolation="committed")


def test_a_refusal_is_raised_as_the_daemon_sent_it(wire):
    with Server(problem(404, "topic_not_found")) as server, pytest.raises(BrokerError) as caught:
        wire(server.url).ask("GET", "/x")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.status, error.code, error.outcome, str(error)) == (
        404, "topic_not_found", "not-applied", "topic_not_found: why (how)",
    )  # fmt: skip
    assert len(server.requests) == 1


def test_overload_is_retried_and_a_missing_transaction_service_is_not(wire):
    with Server(problem(503, "overloaded"), (200, b"ok")) as server:
        assert wire(server.url).ask("GET", "/x").body == b"ok"
    with Server(problem(503, "transactions_unavailable")) as server, pytest.raises(BrokerError):
        wire(server.url).ask("GET", "/x")
    assert len(server.requests) == 1


def test_the_next_url_is_asked_when_one_is_dead_or_leaving(wire):
    with Server((200, b"ok")) as alive, Server(problem(503, "shutting_down")) as leaving:
        asked = wire(dead_url(), leaving.url, alive.url, retries=0)
        assert asked.ask("GET", "/x").body == b"ok"
        assert asked.ask("GET", "/x").body == b"ok"
    assert (len(leaving.requests), len(alive.requests)) == (1, 2)


def test_a_dead_daemon_is_named_with_advice(wire):
    url = dead_url()
    with pytest.raises(BrokerError) as caught:
        wire(url).ask("GET", "/x")
    text = str(caught.value)
    assert url in text
    assert "refused" in text
    assert "attempts: 3" in text
    assert "check that the daemon runs, and the option url" in text
    assert caught.value.outcome == "not-applied"


def test_a_lost_answer_leaves_the_outcome_unknown(wire):
    with Server((None, None)) as server:
        with pytest.raises(BrokerError) as caught:
            wire(server.url).ask("POST", "/x", b"{}", repeatable=False)
        assert (caught.value.outcome, len(server.requests)) == ("unknown", 1)


def test_a_refusal_after_a_lost_answer_says_nothing_of_the_first_attempt(wire):
    with Server((None, None), problem(409, "producer_fenced")) as server, pytest.raises(BrokerError) as caught:
        wire(server.url).ask("POST", "/x", b"{}")
    assert (caught.value.code, caught.value.outcome) == ("producer_fenced", "unknown")


def test_another_server_at_the_url_is_distinguished_from_a_daemon(wire):
    with Server((404, b"<html>nothing here</html>")) as server, pytest.raises(BrokerError) as caught:
        wire(server.url).ask("GET", "/x")
    assert "not as a Plainsong daemon does" in str(caught.value)
    assert "nothing here" in str(caught.value)


@pytest.mark.parametrize("body", [b"<html>", b"1", b"{}", b'["generation"]'])
def test_a_staged_publish_that_another_server_answers_has_not_succeeded(wire, body):
    with Server((200, body)) as other:
        calls = Calls(wire(dead_url(), other.url), "n")
        with pytest.raises(
            BrokerError, match=f"{other.url} answered 200, but not as a Plainsong daemon does"
        ) as caught:
            calls.publish_staged("t", producer="p", sequence_id=1, segments=["s"])
    assert (caught.value.code, caught.value.outcome) == ("unexpected_answer", "unknown")


def test_a_connection_that_was_idle_for_long_is_not_used_again(wire, monkeypatch):
    with Server((200, b"ok")) as server:
        asked = wire(server.url)
        asked.ask("GET", "/x")
        first = asked._connection
        asked.ask("GET", "/x")
        assert asked._connection is first
        monkeypatch.setattr("pyspark_plainsong.wire.MAX_IDLE_S", -1.0)
        asked.ask("GET", "/x")
        assert asked._connection is not first


def test_a_pickled_wire_has_no_connection_and_reads_its_token_again(wire, tmp_path):
    token = tmp_path / "token"
    token.write_text("one\n")
    with Server((200, b"ok")) as server:
        asked = wire(server.url, token_file=str(token))
        asked.ask("GET", "/x")
        token.write_text("two\n")
        copy = pickle.loads(pickle.dumps(asked))
        copy.ask("GET", "/x")
        copy.close()
        assert b"one" not in pickle.dumps(asked)
    assert [headers["Authorization"] for _, _, headers, _ in server.requests] == ["Bearer one", "Bearer two"]


def test_a_replaced_token_is_read_again_when_the_old_one_is_refused_once(wire, tmp_path):
    token = tmp_path / "token"
    token.write_text("one\n")
    refusal = (401, b'{"status": 401, "code": "unauthenticated", "detail": "no", "outcome": "not-applied"}')
    with Server((200, b"ok"), refusal, (200, b"ok"), refusal) as server:
        asked = wire(server.url, token_file=str(token), retries=3)
        asked.ask("POST", "/x", repeatable=False)
        token.write_text("two\n")
        asked.ask("POST", "/x", repeatable=False)
        with pytest.raises(BrokerError, match="unauthenticated"):
            asked.ask("POST", "/x")
    sent = [headers["Authorization"] for _, _, headers, _ in server.requests]
    assert sent == ["Bearer one", "Bearer one", "Bearer two", "Bearer two"]


def test_the_given_authority_is_trusted_and_no_other(wire, tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    listening = Server((200, b"ok"))
    listening._server.socket = context.wrap_socket(listening._server.socket, server_side=True)
    with listening as server:
        url = server.url.replace("http://", "https://")
        with pytest.raises(BrokerError, match="certificate verify failed"):
            wire(url, retries=0).ask("GET", "/x")
        assert wire(url, ca_file=str(authority.file)).ask("GET", "/x").body == b"ok"


def test_the_path_of_a_url_precedes_ours(wire):
    with Server((200, b"[]")) as server:
        assert Calls(wire(f"{server.url}/plainsong"), "n").topics() == []
    assert server.requests[0][1] == "/plainsong/v1/namespaces/n/topics"


def test_a_missing_token_file_is_reported_at_once(tmp_path):
    asked = Wire(("http://127.0.0.1:9",), token_file=str(tmp_path / "none"), retries=1000)
    with pytest.raises(BrokerError, match=r"tokenFile cannot be read.*every host"):
        asked.ask("GET", "/v1/namespaces")
