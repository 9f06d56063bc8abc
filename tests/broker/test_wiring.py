"""The parts that ``broker.main`` connects: the janitor's pass, the service, the index and shutdown."""

from __future__ import annotations

import trio

from broker.assemble import assemble
from broker.config.config import config_of
from broker.metrics import Metrics
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, ListPointers, PublishUnder
from plainsong.protocol.transactions.asks import Begin
from storage.memory import MemoryStore

NAME = TopicName("ns", "t")


async def test_a_round_of_the_janitor_rolls_back_invalid_pointers_and_sets_the_safe_bound(autojump_clock):
    config = config_of({"storage.kind": "memory", "retention.interval_s": 1.0})
    async with trio.open_nursery() as actors:
        service = await assemble(config, MemoryStore(), Metrics("0"), actors)
        await service.start(actors)
        assert service.authority.embedded is not None
        await service.directory.ask(NAME, Create(TopicProperties()))
        begun = await service.authority.embedded.ask(Begin())
        pointer = begun.transaction.write_pointer
        await service.directory.ask(NAME, PublishUnder(PublishRequest([b"x"], pointer), 1))
        await service.authority.embedded.invalidate(pointer)
        assert service.authority.embedded.pruning().last_pass_ms is None
        await trio.sleep(2.5)
        (view,) = await service.directory.ask(NAME, ListPointers())
        assert view.rolled_back
        assert service.authority.embedded.pruning().safe_bound is not None
        service.stop()
        await service.drained()
        actors.cancel_scope.cancel()


async def test_without_a_service_the_janitor_has_no_list(autojump_clock):
    config = config_of({"storage.kind": "memory", "retention.interval_s": 1.0, "transactions.service": "off"})
    async with trio.open_nursery() as actors:
        service = await assemble(config, MemoryStore(), Metrics("0"), actors)
        await service.start(actors)
        await trio.sleep(2.5)
        assert service.authority.invalids is None
        service.stop()
        await service.drained()
        actors.cancel_scope.cancel()
