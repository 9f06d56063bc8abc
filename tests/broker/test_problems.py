"""Problem types resolve: every error links to its explanation."""

from __future__ import annotations

import pytest
from broker_in_process import TOPICS, in_process

from broker.api.description.problems import WHAT_TO_DO

LINK = '</openapi.json>; rel="service-desc"'
every_listener = pytest.mark.parametrize("listener", [None, "hot", "application"])


@every_listener
async def test_the_type_of_a_problem_is_a_path_that_explains_it(listener):
    async with in_process(listener=listener) as daemon:
        problems = [
            await daemon.call("GET", f"{TOPICS}/none", status=404, code="topic_not_found"),
            await daemon.call("POST", f"{TOPICS}/none/poll", status=415, code="unsupported_media_type"),
            await daemon.call("POST", f"{TOPICS}/none/poll", json={}, status=404, code="topic_not_found"),
            await daemon.call("GET", "/nowhere", status=404, code="not_found"),
            await daemon.call("PATCH", "/ping", status=405, code="method_not_allowed"),
        ]
        for problem in problems:
            assert problem.headers["link"] == LINK
            told = problem.json()
            found = (await daemon.call("GET", told["type"])).json()
            shared = ("type", "code", "title", "status", "outcome")
            assert {name: found[name] for name in shared} == {name: told[name] for name in shared}
            assert found["whatToDo"] == WHAT_TO_DO[told["code"]]


@pytest.mark.parametrize("code", sorted(WHAT_TO_DO))
async def test_every_error_is_explained_to_programs_and_to_people(daemon, code):
    found = (await daemon.call("GET", f"/errors/{code}")).json()
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    shown = await daemon.call("GET", f"/errors/{code}", headers=browser)
    assert shown.headers["content-type"].startswith("text/plain")
    for part in (str(found["status"]), found["code"], found["title"], found["outcome"], found["whatToDo"]):
        assert part in shown.text


async def test_the_first_page_and_a_trailing_slash_redirect(daemon):
    for path, hint in (
        ("/", "the console is at /console, and /openapi.json lists the routes"),
        ("/ping/", "try /ping"),
        ("/nowhere", ""),
    ):
        assert (await daemon.call("GET", path, status=404, code="not_found")).json()["hint"] == hint


async def test_an_invalid_position_is_refused_with_the_valid_forms(daemon):
    await daemon.create()
    answer = await daemon.call("GET", f"{TOPICS}/t/events?from=oldest", status=400, code="invalid_message_id")
    assert answer.json()["hint"] == "use an id of 40 hex digits, or a time in milliseconds; 0 is the oldest message"


async def test_an_unknown_error_is_not_found(daemon):
    answer = await daemon.call("GET", "/errors/topic_not_fond", status=404, code="not_found")
    assert "topic_not_found" in answer.json()["hint"]
