"""Requests to and from an instance of version 0.1: the first in the new format, all later ones in the old."""

from __future__ import annotations

from typing import Any

import pytest

from broker.http.messages import Request
from broker.link.flow import Reply
from broker.link.http_codec import decode_request
from broker.link.version_0_1 import call_route, hot_as_request
from broker.security.identity import Identity
from plainsong.protocol.errors import BadRequest, Forbidden, InvalidParameter
from plainsong.protocol.link import VOCABULARY
from plainsong.protocol.page import HIDDEN_COUNTED, Held

TOPIC = {"namespace": "default", "topic": "orders"}


class Old:
    """A link to an instance of version 0.1, which supports only these kinds."""

    is_0_1 = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, bytes]] = []

    async def call(self, kind: str, value: Any, body: bytes = b"") -> Reply:
        self.calls.append((kind, value, body))
        if kind not in ("hot", "view"):
            raise BadRequest(f"{kind!r} is nothing this version answers", hint="are all of one version?")
        return Reply("answered")


async def test_version_0_1_gets_hot_and_view_calls_after_one_attempt_in_the_new_format():
    link: Any = Old()
    publish = Request(TOPIC, "ttl=7", {"content-type": "application/json", "x": "y"}, b"{}", "r1", 5)
    assert (await call_route(link, "publish", publish)).value == "answered"
    assert (await call_route(link, "commit", Request({"transaction": "7"}, "", {}))).value == "answered"
    assert (await call_route(link, "get_stats", Request(TOPIC, "", {}))).value == "answered"
    kept = {"content-type": "application/json"}
    assert [kind for kind, _, _ in link.calls] == ["request", "hot", "hot", "view"]
    assert link.calls[1][1:] == (["publish", "default", "orders", "", "ttl=7", kept, "r1", 5], b"{}")
    assert link.calls[2][1] == ["commit", "", "", "7", "", {}, "", 0]
    assert link.calls[3][1] == ["get_stats", TOPIC, "", {}, "", 0]


async def test_any_other_refusal_goes_to_the_caller():
    class Refusing(Old):
        async def call(self, kind: str, value: Any, body: bytes = b"") -> Reply:
            raise InvalidParameter("this is no request")

    link: Any = Refusing()
    with pytest.raises(InvalidParameter):
        await call_route(link, "publish", Request(TOPIC, "", {}))
    assert not link.is_0_1


async def test_a_request_with_a_name_is_not_forwarded_to_an_owner_that_cannot_check_its_grants():
    link: Any = Old()
    with pytest.raises(Forbidden):
        await call_route(link, "publish", Request(TOPIC, "", {}, who=Identity("shop", "token", "28d95dc87115")))
    assert [kind for kind, _, _ in link.calls] == ["request"]


@pytest.mark.parametrize(
    ("hot", "route", "path"),
    [
        (["publish", "default", "orders", "", "ttl=7", {"accept": "a"}, "r1", 5], "publish", TOPIC),
        (["begin", "", "", "", "ttl=7", {"accept": "a"}, "r1", 5], "begin", {}),
        (["abort", "", "", "7", "ttl=7", {"accept": "a"}, "r1", 5], "abort", {"transaction": "7"}),
    ],
)
def test_a_call_of_version_0_1_is_a_request(hot, route, path):
    name, request = decode_request(hot_as_request(hot), b"{}")
    assert (name, request.path, request.query, request.headers) == (route, path, "ttl=7", {"accept": "a"})
    assert (request.request_id, request.waited_ms, request.body) == ("r1", 5, b"{}")


@pytest.mark.parametrize("hot", [["drain", "", "", "", "", {}, "", 0], ["publish"], []])
def test_an_invalid_hot_call_is_refused(hot):
    with pytest.raises(ValueError, match=r".+"):
        hot_as_request(hot)


@pytest.mark.parametrize("held", [Held(7, 5, 3), Held(7, 5, HIDDEN_COUNTED, hidden_more=True), Held(7)])
def test_the_transaction_that_holds_a_page_travels_as_in_version_0_1(held):
    packed = VOCABULARY.pack(held)
    assert b"pointer" in packed
    assert b"hidden_messages" not in packed
    assert VOCABULARY.unpack(packed) == held
