"""Work that keeps a store's upkeep busy: volumes are sealed, dropped and rewritten, topics come and go.

Its messages are part of the history where they stay: of topics with a single message each, which are what is left alive of
most volumes. What expires, or goes with its topic, the checker does not know; here it is compared at once.
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

#: Its messages live for a second, so that there is always something to remove.
FLEETING = "fleeting"
#: It is deleted and created again, all the time.
GOING = "going"
#: Topics with a single message each; no more, since each is read at every end.
SINGLES = 12
PAUSE_S = 0.01


async def churn(stage: Stage, seed: int) -> None:
    """Large messages that live for a second, so that volumes are sealed and dropped."""
    async with stage.voice(seed) as voice:
        path = topic_path(FLEETING)
        while not stage.over:
            with suppress(NotSent, Doubt, Refused):
                await voice.tell("PUT", path + "?ifNotExists=true", {"ttl": 1})
                write = Write(FLEETING, (b"x" * 3000 + str(voice.rng.random()).encode(),), 0.0)
                await publish(voice, write)
            await trio.sleep(PAUSE_S)


async def singles(stage: Stage, seed: int) -> None:
    """Topics with one message each, all over the time, so that volumes stay of which nothing else is alive."""
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
    """A topic is created, written, read and deleted, again and again: it has the messages of its generation alone."""
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


#: What runs next to the writers that the checker knows.
BUSTLE = (churn, singles, come_and_go)


async def read_singles(stage: Stage) -> None:
    """Add the topics with single messages to the history's logs; one that is missing is made, and empty."""
    async with stage.voice(4) as voice:
        for topic in {write.topic for write in stage.history.writes} - set(stage.topics):
            await at_last(stage, partial(voice.tell, "PUT", topic_path(topic, "?ifNotExists=true"), {}))
            rows = await at_last(stage, partial(log_of, voice, topic, stage.cluster.instances[0]))
            stage.history.logs[topic] = rows


async def lost_since(stage: Stage, history: History, before_s: float) -> list[str]:
    """What was acknowledged before a moment, and committed if it belongs to a transaction, and is not there now."""
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
