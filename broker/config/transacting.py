"""The settings of transactions: who decides them, how long they may take, and how many there may be."""

from __future__ import annotations

from dataclasses import dataclass

from broker.config.meaning import GIB, KIB, MIB, choice, count, optional_address, seconds, size, switch, whole_seconds

_CENTURY_S = 100 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class TransactionsConfig:
    """Transactions: who decides them, and their bounds."""

    service: str = choice(
        "embedded",
        "Who decides transactions: this daemon, the Tephra at transactions.tephra, or nobody this daemon knows "
        "(publishing under a pointer and polling with a snapshot work all the same). It may be changed while no "
        "undecided pointer has messages here.",
        "embedded",
        "tephra",
        "off",
    )
    tephra: str = optional_address("The Thrift address of the Tephra that decides; empty: none.")
    tephra_refresh_s: float = seconds(
        5.0,
        "How often that Tephra is asked for its state.",
        small="it is asked for its whole state all the time",
        large="committed polls see what was committed so much later",
        low=0.05,
        high=3_600.0,
    )
    thrift: str = optional_address(
        "Where to serve Tephra's clients by Thrift, from the embedded service; empty: nowhere. "
        "While it is set the invalid list is not pruned by itself, since other stores may rely on it."
    )
    timeout_s: int = whole_seconds(
        30,
        "The time-out of a short transaction that names none.",
        small="clients that pause lose their transactions",
        large="a client that died holds committed readers for as long",
        low=1,
        high=_CENTURY_S,
    )
    max_timeout_s: int = whole_seconds(
        3_600,
        "The longest time-out a short transaction may ask for; an hour by default.",
        small="clients with much to do must begin long transactions",
        large="a client that died holds committed readers for as long",
        low=1,
        high=_CENTURY_S,
    )
    long_timeout_s: int = whole_seconds(
        86_400,
        "The time-out of a long transaction; a day by default.",
        small="batch jobs lose their transactions",
        large="a job that died holds committed readers for as long",
        low=1,
        high=_CENTURY_S,
    )
    max_lifetime_s: int = whole_seconds(
        90_000,
        "The age beyond which a write pointer is refused with 409 transaction_expired; 25 hours by "
        "default, 0 switches the check off, and with it the pruning of the invalid list.",
        small="long transactions cannot publish",
        large="messages of transactions that nobody remembers can still appear, and the invalid list grows for as long",
        low=0,
        high=_CENTURY_S,
    )
    max_open: int = count(
        20_000,
        "Transactions in progress at once; beyond it the answer to a new one is 503 overloaded.",
        small="clients are sent away",
        large="every snapshot names all of them, and grows by 8 bytes for each",
        high=1_000_000,
    )
    max_invalid: int = count(
        100_000,
        "Pointers on the invalid list; beyond it no transaction begins until some are pruned.",
        small="a time of many time-outs ends transactions for everybody",
        large="every snapshot names all of them, and grows by 8 bytes for each",
    )
    max_outcomes: int = count(
        200_000,
        "Decided transactions whose outcome is remembered; beyond it the oldest is forgotten.",
        small="a client that lost the answer to its commit may not be told any more",
        large="more memory, and a longer start",
    )
    outcome_retention_s: int = whole_seconds(
        90_000,
        "How long the outcome of a transaction is remembered; 25 hours by default.",
        small="a client that lost the answer to its commit may not be told any more",
        large="more memory, and a longer start",
        low=1,
        high=_CENTURY_S,
    )
    max_change_set_bytes: int = size(
        16 * MIB,
        "The keys of one transaction's change set together; beyond it the answer is 413 transaction_too_large.",
        small="transactions that changed much cannot be committed",
        large="the memory of the service grows with what its clients change",
        low=KIB,
        high=1 * GIB,
    )
    max_per_topic: int = count(
        65_536,
        "Undecided pointers one topic may have messages of; beyond it a new one is 503 overloaded.",
        small="publishers under many transactions are sent away",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_held_polls: int = count(
        10_000,
        "Committed polls that may wait for a transaction to be decided; beyond it the answer is 503 overloaded.",
        small="waiting consumers are sent away",
        large="memory grows with waiting consumers",
        high=1_000_000,
    )
    commit_deadline_s: float = seconds(
        15.0,
        "Among several instances, how long a commit waits for its topics to finish what they write under it; after it "
        "nothing has happened, and it can be sent again. At least cluster.session_timeout_s and 3 s.",
        small="commits fail while topics change hands, and have to be sent again",
        large="whoever commits waits for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    abort_deadline_s: float = seconds(
        15.0,
        "How long an abort may take to roll back the transaction's messages; after it the transaction is invalid instead. "
        "Among several instances at least cluster.session_timeout_s and 3 s.",
        small="aborts end as invalidations while topics are being loaded, or change hands",
        large="whoever aborts waits for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    prune: bool = switch(
        True,
        "Take pointers off the invalid list once all their messages are rolled back and they are older than "
        "transactions.max_lifetime_s; never while transactions.thrift is set.",
    )
