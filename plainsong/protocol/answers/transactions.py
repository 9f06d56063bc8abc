"""Answers of the transaction service."""

from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

from plainsong.protocol.answers.fields import Base64, Count, Json, Milliseconds, Pointer, component
from plainsong.protocol.transactions.asks import State

Service: TypeAlias = Annotated[str, Json("identifies the transaction service; ids of different services may be equal")]


@component("BegunTransaction")
class BegunTransaction(TypedDict):
    """A transaction that was begun, or that got a new write pointer."""

    id: Pointer
    writePointer: Pointer
    readPointer: Pointer
    snapshot: Annotated[Base64, Json("pass this to a poll as transaction")]
    expires: Milliseconds
    service: Service


@component("DecidedTransaction")
class DecidedTransaction(TypedDict):
    """The state of a transaction after a request."""

    id: Pointer
    state: State


@component("Transaction")
class TransactionRow(TypedDict):
    """A transaction, decided or not."""

    id: Pointer
    writePointer: Pointer
    type: Literal["short", "long"] | None
    clientId: str | None
    state: State
    startedMs: Milliseconds | None
    expiresMs: Milliseconds | None
    decidedMs: Milliseconds | None
    topics: list[str]
    hiddenMessages: Count | None
    name: NotRequired[Annotated[str, Json("the name that began it, if authentication is on and the caller may see it")]]


@component("TransactionOutcome")
class TransactionOutcome(TransactionRow):
    """A transaction, and how long its outcome is remembered."""

    keptUntilMs: Milliseconds | None
    service: Service


class OldestPointer(TypedDict):
    """The oldest write pointer with messages in a topic."""

    topic: str
    oldestPointer: Pointer


@component("Pruning")
class PruningFields(TypedDict):
    """The bound up to which the invalid list may be pruned."""

    invalid: Count
    oldestInvalid: Pointer | None
    safeBound: Pointer | None
    lastPassMs: Milliseconds | None
    maxLifetimeMs: Count
    topics: Count
    oldestByTopic: list[OldestPointer]
    keptBecause: str | None
