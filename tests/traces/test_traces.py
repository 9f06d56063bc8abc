"""Traces from a publish to the processing of each message: real programs, a real daemon, and a collector over HTTP."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from broker import main
from broker.config.config import config_of
from broker.http.messages import Request
from broker.link.http_codec import decode_request, encode_request
from broker.tracing import EXPORTED_AT_ONCE, QUEUED, Traces, traced
from plainsong import Client
from plainsong.cli.command import Exit
from storage.base import StoreUnusable
from tests.daemon.harness import Daemon, clean_environ, free_port
from tests.patience import PATIENCE_S
from tests.traces.collector import Collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, SPAN = PARENT.split("-")[1:3]
UNSAMPLED = PARENT[:-2] + "00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def url_of(daemon: Daemon) -> str:
    return "http://{}:{}".format(*daemon.address)


def post(daemon: Daemon, path: str, body: object, **headers: str) -> int:
    connection = http.client.HTTPConnection(*daemon.address, timeout=PATIENCE_S)
    try:
        place = f"/v1/namespaces/default/topics/{path}"
        connection.request("POST", place, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


#: A program that sets up OpenTelemetry as its documentation says, independently of plainsong's tracing.
SET_UP = """
import sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from plainsong import AsyncClient, Client

provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[2] + "/v1/traces")))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("shop")
url = sys.argv[1]
"""


def run(program: str, *arguments: str, set_up: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", (SET_UP + program + "\nprovider.shutdown()") if set_up else program, *arguments],
        env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- the messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_publish_gives_its_trace_to_each_message_that_has_none(tmp_path, processes):
    """This works without OpenTelemetry on either side, for any program that sends the header."""
    with Daemon(tmp_path / "data", f"http.processes={processes}") as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        body = {
            "messages": [
                "a",
                {"payload": "b", "attributes": {"traceparent": "own"}},
                {"payload": "c", "attributes": {"k": "v"}},
            ]
        }
        assert post(daemon, "orders/publish", body, traceparent=PARENT, tracestate="a=1") == 200
        assert post(daemon, "orders/publish", {"messages": ["d"]}, traceparent="nonsense") == 200
        given = {"traceparent": PARENT, "tracestate": "a=1"}
        assert [dict(message.attributes) for message in client.read("orders")] == [
            given, {"traceparent": "own"}, {"k": "v", **given}, {},
        ]  # fmt: skip


def test_stored_messages_have_the_trace_of_their_store(tmp_path):
    with Daemon(tmp_path / "data") as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        transaction = client.transactions.begin()
        stored = {"transactionWritePointer": transaction.write_pointer, "messages": ["a"]}
        assert post(daemon, "orders/store", stored, traceparent=PARENT) == 200
        client.publish("orders", transaction=transaction)
        client.transactions.commit(transaction)
        (message,) = client.read("orders")
        assert message.attributes == {"traceparent": PARENT}


def test_an_instance_that_forwards_a_request_passes_its_trace_on():
    headers = {"traceparent": PARENT, "tracestate": "a=1", "x-other": "stays here"}
    request = Request({"namespace": "default", "topic": "orders"}, "", headers, b"{}")
    route, forwarded = decode_request(encode_request("publish", request), request.body)
    assert (route, forwarded.headers) == ("publish", {"traceparent": PARENT, "tracestate": "a=1"})


# --- clients ---------------------------------------------------------------------------------------


def test_a_trace_leads_from_publish_through_the_daemon_to_the_poll_and_the_work(tmp_path, collector):
    with Daemon(tmp_path / "data", f"otel.endpoint={collector.url}") as daemon:
        run(
            "client = Client(url)\n"
            "client.create_topic('orders')\n"
            "with tracer.start_as_current_span('checkout'):\n"
            "    client.publish('orders', b'one')\n"
            "(message,) = client.read('orders')\n"
            "from plainsong.cli.main import program, run\n"
            "assert run(program, ['on', 'orders', '--run', 'true', '--once', '--url', url, '--position', 'reader:r'], 'plainsong') == 0\n",
            url_of(daemon),
            collector.url,
        )
        checkout, send = collector.one("checkout"), collector.one("send default:orders")
        assert (send.kind, send.trace, send.parent) == ("producer", checkout.trace, checkout.id)
        served = collector.one("publish default:orders")
        assert (served.service, served.kind) == ("plainsong", "server")
        assert (served.trace, served.parent) == (send.trace, send.id)
        assert 0 < served.took_ns < send.took_ns
        with Client(url_of(daemon)) as client:
            (message,) = client.read("orders")
        assert message.attributes["traceparent"].startswith(f"00-{send.trace}-{send.id}-")
        process = collector.one("process default:orders")
        assert (process.kind, process.links) == ("consumer", (send.id,))
        received = [each for each in collector.spans() if each.name == "receive default:orders"]
        assert [(each.kind, each.links) for each in received] == [("client", (send.id,))] * 2
        for span, operation in ((send, "send"), (received[0], "receive"), (process, "process")):
            assert span.attributes == {
                "messaging.system": "plainsong",
                "messaging.destination.name": "default:orders",
                "messaging.operation.name": operation,
                "messaging.operation.type": operation,
                "messaging.message.id": str(message.id),
            }
        assert served.attributes["http.response.status_code"] == 200
        assert served.attributes["messaging.batch.message_count"] == 1


def test_every_way_of_publishing_has_a_span_and_its_messages_lead_to_their_origin(tmp_path, collector):
    """A batched message leads to the span in which the program published it, not to that of the thread that sent it."""
    topics = ("plain", "gathered", "produced", "streamed", "transacted", "atomic", "awaited")
    with Daemon(tmp_path / "data") as daemon:
        said = run(
            "import anyio, json\n"
            "client = Client(url)\n"
            f"for topic in {topics}: client.create_topic(topic)\n"
            "at = {}\n"
            "def within(name):\n"
            "    span = tracer.start_as_current_span(name)\n"
            "    return span\n"
            "with within('plain') as span: client.publish('plain', [b'1', b'2'])\n"
            "with client.publisher('gathered') as publisher:\n"
            "    with within('gathered'): publisher.send(b'1')\n"
            "with client.producer('produced', 'p') as producer:\n"
            "    with within('produced'): producer.send(b'1')\n"
            "with client.stream('streamed') as stream:\n"
            "    with within('streamed'): stream.publish(b'1')\n"
            "with client.transaction():\n"
            "    with within('transacted'): client.publish('transacted', b'1')\n"
            "with within('atomic'): client.publish_atomic('atomic', 'k', [b'1', b'2'])\n"
            "async def main():\n"
            "    async with AsyncClient(url) as client:\n"
            "        with within('awaited'): await client.publish('awaited', b'1')\n"
            "anyio.run(main)\n"
            f"for topic in {topics}:\n"
            "    at[topic] = [message.attributes['traceparent'].split('-')[2] for message in client.read(topic)]\n"
            "print(json.dumps(at))\n",
            url_of(daemon),
            collector.url,
        )
    carried = json.loads(said)
    spans = {each.id: each for each in collector.spans()}
    for topic in topics:
        assert {spans[each].trace for each in carried[topic]} == {collector.one(topic).trace}, topic
    for topic in ("plain", "atomic", "awaited"):
        assert {spans[each].name for each in carried[topic]} == {f"send default:{topic}"}
        assert collector.one(f"send default:{topic}").parent == collector.one(topic).id
    for topic in ("gathered", "produced", "transacted"):
        send = collector.one(f"send default:{topic}")
        assert carried[topic] == [collector.one(topic).id]
        assert send.links == (collector.one(topic).id,)
    assert carried["streamed"] == [collector.one("streamed").id]
    assert collector.one("send default:plain").attributes["messaging.batch.message_count"] == 2


def test_a_publish_that_fails_says_so_in_its_span(tmp_path, collector):
    with Daemon(tmp_path / "data", f"otel.endpoint={collector.url}") as daemon:
        run(
            "from plainsong import errors\n"
            "try: Client(url).publish('missing', b'1')\n"
            "except errors.TopicNotFound: pass\n",
            url_of(daemon),
            collector.url,
        )
        assert collector.one("send default:missing").failed
        served = collector.one("publish default:missing")
        assert (served.attributes["http.response.status_code"], served.failed) == (404, False)


# --- the daemon ------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_the_daemon_records_requests_of_recorded_traces_once_and_no_others(tmp_path, collector, processes):
    with Daemon(tmp_path / "data", f"otel.endpoint={collector.url}", f"http.processes={processes}") as daemon:
        with Client(url_of(daemon)) as client:
            client.create_topic("orders")
            client.publish("orders", b"without a trace")
        for parent in (UNSAMPLED, "nonsense", PARENT):
            assert post(daemon, "orders/publish", {"messages": ["a", "b"]}, traceparent=parent) == 200
        assert post(daemon, "orders/poll", {}, traceparent=PARENT) == 200
        assert collector.one("poll default:orders").parent == SPAN
        assert collector.one("publish default:orders").parent == SPAN  # may arrive later, from another front end
        daemon.stop()
    found = [(each.name, each.trace, each.parent) for each in collector.spans()]
    assert sorted(found) == [("poll default:orders", TRACE, SPAN), ("publish default:orders", TRACE, SPAN)]


def test_spans_that_wait_are_sent_when_the_daemon_leaves(tmp_path, collector):
    with Daemon(tmp_path / "data", f"otel.endpoint={collector.url}") as daemon:
        with Client(url_of(daemon)) as client:
            client.create_topic("orders")
        assert post(daemon, "orders/publish", {"messages": ["a"]}, traceparent=PARENT) == 200
        assert daemon.stop() == Exit.OK
    assert [each.name for each in collector.spans()] == ["publish default:orders"]


async def test_traces_are_closed_when_the_daemon_fails_to_start(tmp_path, monkeypatch):
    class Recording:
        is_closed = False

        async def aclose(self):
            self.is_closed = True

    traces = Recording()
    monkeypatch.setattr(main, "open_traces", lambda config: traces)
    (tmp_path / "data").write_text("no directory")
    with pytest.raises(StoreUnusable):
        await main.run_daemon(config_of({"storage.data_dir": tmp_path / "data"}), announce=print)
    assert traces.is_closed


def test_an_unreachable_collector_costs_nothing_and_is_logged_once(tmp_path):
    with Daemon(tmp_path / "data", f"otel.endpoint=http://127.0.0.1:{free_port()}") as daemon:
        with Client(url_of(daemon)) as client:
            client.create_topic("orders")
        for _ in range(20):
            assert post(daemon, "orders/publish", {"messages": ["a"]}, traceparent=PARENT) == 200
        daemon.wait_for_line("traces cannot be sent")
        assert post(daemon, "orders/publish", {"messages": ["a"]}, traceparent=PARENT) == 200
        begun_s = time.monotonic()
        assert daemon.stop() == Exit.OK
        assert time.monotonic() - begun_s < PATIENCE_S
        assert sum("traces cannot be sent" in line for line in daemon.lines) == 1
        assert not any("opentelemetry" in line for line in daemon.lines)


def test_spans_that_a_slow_collector_does_not_take_are_dropped_beyond_the_bound():
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from broker.api.routes import ROUTES
    from broker.http.messages import Answer, Answered
    from broker.http.route import Endpoint

    released, taken = threading.Event(), [0]

    class Slow(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            released.wait(PATIENCE_S)
            taken[0] += len(spans)  # type: ignore[arg-type]
            return SpanExportResult.SUCCESS

    def handler(request: Request, answered: Answered) -> None:
        answered(Answer(200))

    traces = Traces("http://127.0.0.1:1", "0", "a", Slow())
    endpoint = Endpoint(next(route for route in ROUTES if route.name == "publish"), handler)
    request = Request({"namespace": "default", "topic": "orders"}, "", {"traceparent": PARENT})
    for _ in range(4 * QUEUED):
        traces.record(endpoint, request, 200, time.time_ns(), time.time_ns())
    released.set()
    traces._provider.shutdown()
    assert QUEUED <= taken[0] <= QUEUED + 2 * EXPORTED_AT_ONCE


def test_the_daemons_span_ends_before_the_answer_is_sent():
    """The daemon's span is thus within the client's, even if the daemon is interrupted after sending."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from broker.api.routes import ROUTES
    from broker.http.messages import Answer, Answered
    from broker.http.route import Endpoint

    def handler(request: Request, answered: Answered) -> None:
        answered(Answer(200))

    exporter, sent_ns = InMemorySpanExporter(), []
    traces = Traces("http://127.0.0.1:1", "0", "a", exporter)
    endpoint = traced(Endpoint(next(route for route in ROUTES if route.name == "publish"), handler), traces)
    request = Request({"namespace": "default", "topic": "orders"}, "", {"traceparent": PARENT})
    endpoint.handler(request, lambda outcome: sent_ns.append(time.time_ns()))
    traces._provider.force_flush()
    (span,) = exporter.get_finished_spans()
    assert span.end_time <= sent_ns[0]
    traces._provider.shutdown()


# --- without it ------------------------------------------------------------------------------------


def test_a_program_without_tracing_loads_nothing_of_it(tmp_path):
    with Daemon(tmp_path / "data") as daemon:
        run(
            "import sys\n"
            "from plainsong import Client\n"
            "with Client(sys.argv[1]) as client:\n"
            "    client.create_topic('orders')\n"
            "    client.publish('orders', b'one')\n"
            "    with client.transaction(): client.publish('orders', b'two')\n"
            "    with client.publisher('orders') as publisher: publisher.send(b'three')\n"
            "    assert len(list(client.read('orders'))) == 3\n"
            "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n",
            url_of(daemon),
            set_up=False,
        )


def test_a_daemon_without_a_collector_loads_nothing_of_it(tmp_path):
    loaded = [sys.executable, "-X", "importtime"]
    for endpoint, wanted in (("", False), (f"http://127.0.0.1:{free_port()}", True)):
        with Daemon(tmp_path / f"data{wanted}", f"otel.endpoint={endpoint}", wrapper=loaded) as daemon:
            daemon.stop()
            assert ("opentelemetry" in daemon.errors) is wanted


def test_a_daemon_that_cannot_trace_does_not_start_and_says_what_to_install(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from plainsong.cli.main import main\n"
        "sys.argv[1:] = ['serve', '--data-dir', 'data', '--set', 'otel.endpoint=http://127.0.0.1:4318']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == Exit.USAGE
    assert done.stderr == (
        "error: otel.endpoint is set, but OpenTelemetry is not installed\nhint: pip install "
        "'plainsong-server[otel]', or leave otel.endpoint empty\n"
    )
    assert list(tmp_path.iterdir()) == []
