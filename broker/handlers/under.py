"""Asking a topic for what is written, or rolled back, under a write pointer: it may have to be enlisted first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from protocol.errors import PlainsongError, TransactionNotInProgress
from protocol.topic.asks import Describe
from protocol.topic.enlisted import NotEnlisted

if TYPE_CHECKING:
    from broker.service import Service
    from protocol.names import TopicName
    from protocol.topic.asks import Ask
    from protocol.topic.pointer_asks import RollBackPointer

A = TypeVar("A")


async def asked_under(service: Service, name: TopicName, pointer: int | None, ask: Ask[A]) -> A:
    """The topic's answer; ``pointer`` None: nothing is written under one. Raises as the topic and the service do."""
    enlistments = service.directory.around.enlistments
    if pointer is None or enlistments is None:
        return await service.directory.ask(name, ask)
    return await enlistments.enlisted(name, pointer, partial(service.directory.ask, name, ask))


async def enlist_first(service: Service, name: TopicName, pointer: int | None) -> None:
    """Enlist a topic for what is put into its mailbox next; what cannot be done is said by the topic.

    Raises:
      TransactionNotInProgress, TransactionsUnavailable, NoOwner, Overloaded: nothing happened.
    """
    enlistments = service.directory.around.enlistments
    if pointer is None or enlistments is None:
        return
    if not enlistments.is_open(name):
        try:
            await service.directory.ask(name, Describe())
        except PlainsongError:
            return
    await enlistments.enlist(name, pointer)


async def rolled_back(service: Service, name: TopicName, ask: RollBackPointer) -> None:
    """A client's rollback; the topic refuses what is committed, and only who decides knows what is still open.

    Raises:
      TransactionNotInProgress: it is committed, or about to be. TransactionsUnavailable: nobody can say.
    """
    try:
        await service.directory.ask(name, ask)
        return
    except NotEnlisted:
        pass
    try:
        await asked_under(service, name, ask.pointer, ask)
    except TransactionNotInProgress as refused:
        await (
            service.transactions.fresh()
        )  # it may have been aborted, or its time be over: then there is nothing to lose
        try:
            await service.directory.ask(name, ask)
        except NotEnlisted:
            raise refused from None
