"""Fill a data directory while no daemon runs: topics with messages of any age, written as the daemon would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from bench.bodies import BATCH_ROWS, payloads, topic
from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.ids import pack_id
from plainsong.protocol.keys import HIGH_WATER, generation_prefix, metadata_key, system_key
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.topic.state import PositionSequence
from plainsong.protocol.topic.step import RowBatch
from plainsong.protocol.topic.usage import ROW_BYTES, Usage
from storage.leveldb import LevelDBOptions, LevelDBStore

if TYPE_CHECKING:
    from pathlib import Path


def seed(
    directory: Path,
    name: str,
    messages: int,
    size: int,
    first_ms: int,
    ttl_s: int,
    *,
    commit_messages: int = BATCH_ROWS,
) -> list[bytes]:
    """Write a topic whose messages were published from ``first_ms`` on, ``BATCH_ROWS`` per millisecond.

    Args:
      commit_messages: messages per commit, as if from one request; a divisor of ``BATCH_ROWS``.
    Returns:
      The id of the first message of each millisecond.
    """
    return trio.run(_seed, directory, name, messages, size, first_ms, ttl_s, commit_messages)


async def _seed(
    directory: Path, name: str, messages: int, size: int, first_ms: int, ttl_s: int, commit_messages: int
) -> list[bytes]:
    topic_name = topic(name)
    prefix = generation_prefix(topic_name, 1)
    sequence, usage = PositionSequence(), Usage()
    properties = TopicProperties(ttl_s=ttl_s)
    metadata = Metadata(1, properties, created_ms=first_ms, updated_ms=first_ms)
    firsts = []
    async with await LevelDBStore.open(directory, LevelDBOptions()) as store:
        claim = await store.claim(topic_name)
        await store.write([put_one(Table.METADATA, metadata_key(topic_name), metadata.encode())], claim=claim)
        for batch in range(0, messages, commit_messages):
            at = batch % BATCH_ROWS
            texts = payloads(BATCH_ROWS, size)[at : at + min(commit_messages, messages - batch)]
            runs = sequence.take(first_ms + batch // BATCH_ROWS, len(texts))
            roll = RowBatch()
            roll.add(runs, texts, None)
            if batch % BATCH_ROWS == 0:
                firsts.append(pack_id(runs[0].ts_ms, runs[0].first))
            usage.add(runs[0].ts_ms, len(texts), sum(map(len, roll.values)) + ROW_BYTES * len(texts), properties.ttl_ms)
            await store.write([Put(Table.MESSAGE, prefix, roll.suffixes, roll.values)], claim=claim)
        last_ms, last = sequence.last_ts_ms, sequence.last_sequence_id
        mark = HighWater(last_ms, last_ms, last, usage.stored())
        await store.write([put_one(Table.METADATA, system_key(HIGH_WATER, topic_name, 1), mark.encode())], claim=claim)
    return firsts
