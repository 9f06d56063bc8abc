"""Load that causes much upkeep of a store: volumes are sealed, dropped and rewritten, topics created and deleted.

Messages that stay are part of the history: they are in topics with a single message each, the only live rows in most
volumes. The checker cannot judge messages that expire or are deleted with their topic; this module checks the latter
itself.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import count

import trio

from plainsong.protocol.codec import JSON
from plainsong.protocol.requests import PollRequest
from tests.cluster.course import at_last
from tests.cluster.history.records import History, Write
from tests.cluster.readers import log_of
from tests.cluster.voices import EXPECTED, Doubt, NotSent, Refused, Stage, Voice
from tests.cluster.writers import publish
from tests.daemon.talk import topic_path

#: A topic whose messages live for a second, so that there are always messages to remove.
FLEETING = "fleeting"
#: A topic that is repeatedly deleted and created.
GOING = "going"
#: Number of topics with a single message each; small, because each is read whenever the daemon has ended.
SINGLES = 12
PAUSE_S = 0.01


async def churn(stage: Stage, seed: int) -> None:
    """Publish large messages that live for a second, so that volumes are sealed and dropped."""
    async with stage.voice(seed) as voice:
        path = topic_path(FLEETING)
        while not stage.over:
            with suppress(NotSent, Doubt, Refused):
                await voice.tell("PUT", path + "?ifNotExists=true", {"ttl": 1})
                write = Write(FLEETING, (b"x" * 3000 + str(voice.rng.random()).encode(),), 0.0)
                await publish(voice, write)
            await trio.sleep(PAUSE_S)


async def singles(stage: Stage, seed: int) -> None:
    """Create topics with one message each throughout the run, so that some volumes have few live messages."""
    async with stage.voice(seed) as voice:
        for number in range(SINGLES):
            write = Write(f"single-{number}", (b"the only one of %d" % number,), 0.0)
            while not stage.over:
                try:
                    await voice.tell("PUT", topic_path(write.topic, "?ifNotExists=true"), {})
                    break
                except (NotSent, Doubt, Refused):
                    await stage.rest(PAUSE_S)
            if stage.over:
                return
            write.began_s = trio.current_time()
            stage.history.writes.append(write)
            with suppress(NotSent, Doubt, Refused):
                await publish(voice, write)
            await stage.rest(PAUSE_S * 10)


async def come_and_go(stage: Stage, seed: int) -> None:
    """Create, write, read and delete a topic repeatedly; it must contain only messages of its generation."""
    async with stage.voice(seed) as voice:
        voice.expected = EXPECTED | {"topic_not_found"}
        gone: set[bytes] = set()
        sent: set[bytes] = set()
        for number in count():
            if stage.over:
                return
            with suppress(NotSent, Doubt, Refused):
                await voice.tell("PUT", topic_path(GOING, "?ifNotExists=true"), {})
                payload = b"going %d" % number
                sent.add(payload)
                await publish(voice, Write(GOING, (payload,), 0.0))
                found = await _payloads(voice)
                if found & gone or payload not in found:
                    stage.surprises.append(f"{GOING} has {sorted(found)} after {payload!r} and deletions")
                if number % 3 == 0:
                    continue
                await voice.tell("DELETE", topic_path(GOING))
                gone |= sent
                sent = set()
            await stage.rest(PAUSE_S * 5)


async def _payloads(voice: Voice) -> set[bytes]:
    answer = await voice.ask("POST", topic_path(GOING, "/poll"), JSON.encode_poll(PollRequest(None, inclusive=True)))
    return {payload for _, payload in answer.messages()}


#: Load in addition to the writers that the checker judges.
BUSTLE = (churn, singles, come_and_go)


async def read_singles(stage: Stage) -> None:
    """Add the topics with single messages to the history's logs; a missing topic is created, and is empty."""
    async with stage.voice(4) as voice:
        for topic in {write.topic for write in stage.history.writes} - set(stage.topics):
            await at_last(stage, partial(voice.tell, "PUT", topic_path(topic, "?ifNotExists=true"), {}))
            rows = await at_last(stage, partial(log_of, voice, topic, stage.cluster.instances[0]))
            stage.history.logs[topic] = rows


async def lost_since(stage: Stage, history: History, before_s: float) -> list[str]:
    """Return the names of writes that were acknowledged, or committed, before a moment, and whose messages are missing."""
    wanted = [
        write
        for write in history.writes
        if write.ended_s < before_s and (write.transaction is None or write.transaction.committed_s < before_s)
    ]
    found: dict[str, set[bytes]] = {}
    async with stage.voice(5) as voice:
        for topic in {write.topic for write in wanted}:
            rows = await at_last(stage, partial(log_of, voice, topic, stage.cluster.instances[0]))
            found[topic] = {payload for _, payload, pointer in rows if pointer >= 0}
    return [write.name for write in wanted if not found[write.topic].issuperset(write.payloads)]
