"""Clients that read at any instance, committed or not: repeatedly from the start, or with long polls at the end."""

from __future__ import annotations

import trio

from plainsong.protocol.codec import JSON
from plainsong.protocol.frames import FRAMES_TYPE, decode_frames
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.requests import PollRequest
from tests.cluster.harness import Instance
from tests.cluster.history.records import Poll, Row
from tests.cluster.voices import Doubt, NotSent, Refused, Stage, Voice
from tests.daemon.talk import JSON_HEADERS, topic_path

FRAMES = {**JSON_HEADERS, "Accept": FRAMES_TYPE}


async def read_page(
    voice: Voice,
    topic: str,
    position: bytes | None,
    *,
    committed: bool,
    limit: int | None = None,
    wait_ms: int = 0,
    at: Instance | None = None,
    noted: bool = True,
) -> Poll:
    """Read one page after ``position``; ``noted`` adds it to the history. Raises NotSent, Doubt, Refused."""
    instance = at or voice.somebody()
    request = PollRequest(position, position is None, limit)
    query = "&".join(["isolation=committed"] * committed + [f"wait_ms={wait_ms}"] * bool(wait_ms))
    began_s = trio.current_time()
    path = topic_path(topic, f"/poll?{query}")
    answer = await voice.ask("POST", path, JSON.encode_poll(request), FRAMES, at=instance)
    last_id, held_by = answer.headers.get("plainsong-last-id"), answer.headers.get("plainsong-held-by")
    poll = Poll(
        f"{'committed' if committed else 'plain'} reader",
        instance.name,
        topic,
        committed,
        began_s,
        trio.current_time(),
        tuple(answer.messages()),
        FIRST_BOUND if position is None else after(position),
        None if last_id is None else bytes.fromhex(last_id),
        answer.headers["plainsong-end"],  # type: ignore[arg-type]  # one of the three
        None if held_by is None else int(held_by),
    )
    if noted:
        voice.stage.history.polls.append(poll)
    voice.stage.count("polled")
    return poll


async def reader(stage: Stage, seed: int, *, committed: bool, waits: bool, pause_s: float) -> None:
    """Read one topic, and sometimes start over with another, or follow one forever with long polls (``waits``)."""
    async with stage.voice(seed) as voice:
        topic, position = voice.rng.choice(stage.topics), None
        while not stage.over:
            try:
                limit = None if waits else voice.rng.choice(stage.limits)
                page = await read_page(
                    voice, topic, position, committed=committed, limit=limit, wait_ms=2_000 if waits else 0
                )
            except (NotSent, Doubt, Refused):
                await stage.rest(pause_s)
                continue
            position = page.through or position
            if page.end != "more" and not waits and voice.rng.random() < 0.2:
                topic, position = voice.rng.choice(stage.topics), None
            if page.end == "held" or not waits:
                await stage.rest(pause_s)


async def read_whole(voice: Voice, topic: str, at: Instance, *, committed: bool) -> None:
    """Read all pages of a topic at one instance, after all work has ended."""
    position = None
    while True:
        page = await read_page(voice, topic, position, committed=committed, limit=997, at=at)
        if page.end == "end":
            return
        assert page.end == "more", page
        position = page.through


async def log_of(voice: Voice, topic: str, at: Instance) -> list[Row]:
    """Return all rows of a topic, with write pointers."""
    rows: list[Row] = []
    position = None
    headers = {**JSON_HEADERS, "Accept": FRAMES_TYPE + "; fields=pointer"}
    while True:
        request = PollRequest(position, position is None, 997)
        answer = await voice.ask("POST", topic_path(topic, "/poll"), JSON.encode_poll(request), headers, at=at)
        rows += [(each.message_id, each.payload, each.pointer) for each in decode_frames(answer.body, pointers=True)]
        if answer.headers["plainsong-end"] != "more":
            return rows
        position = bytes.fromhex(answer.headers["plainsong-last-id"])
