"""Whether what a daemon says of a producer fits what the database knows: all that can have happened in between.

After a crash some messages may be on the way: they have their numbers, and nobody knows whether the daemon has them.
Its last sequence id tells, as long as daemon, topic and database are those that they were. When one of them is not,
it tells nothing, and to go on would lose messages or publish them twice.
"""

from __future__ import annotations

from typing import NamedTuple

from plainsong.sql.outbox_errors import OutboxInDoubt, OutboxUnusable

#: What a person can do.
DECIDE = "plainsong outbox decide: --resend publishes them, perhaps again; --forget takes them as published"


class Standing(NamedTuple):
    """How far a topic has come, by the database."""

    namespace: str
    producer: str
    epoch: int
    """Of the session that was opened last; 0: none yet."""
    generation: int | None
    """The topic's, then."""
    next_number: int
    last_sent: int
    """The highest number that this generation is known to have; -1: none."""

    def check(self, topic: str, namespace: str) -> None:
        """Raises OutboxUnusable: the topic's messages went to another namespace until now."""
        if self.namespace != namespace:
            detail = f"messages of {topic} have gone to namespace {self.namespace} until now, and not to {namespace}"
            raise OutboxUnusable(detail, hint="give the relay that namespace, or use another outbox")

    def has_moved(self, opened: Opened) -> bool:
        """Whether the topic was deleted and made anew since."""
        return self.generation not in (None, opened.generation)


class Opened(NamedTuple):
    """What the daemon says as a producer is opened."""

    epoch: int
    generation: int
    last_sequence_id: int
    """-1: it has nothing of this producer."""


def check_remembered(topic: str, standing: Standing, known: int | None, on_the_way: int) -> None:
    """Raises OutboxInDoubt when the daemon has forgotten the producer; before it is opened, which would hide that.

    Args:
      known: the producer's last sequence id in the generation that the database names; None: nobody knows it.
      on_the_way: how many messages have a number and are not known to be sent.
    """
    if standing.generation is not None and known is None and on_the_way:
        why = f"the daemon has forgotten what topic {topic} had of producer {standing.producer}"
        raise OutboxInDoubt(f"{why}; {on_the_way} messages were on the way", hint=DECIDE, topic=topic)


def check_doubt(topic: str, standing: Standing, opened: Opened, before: int | None, on_the_way: int) -> None:
    """Raises OutboxInDoubt unless the daemon's word tells of every message on the way whether it has it.

    Args:
      before: the last sequence id in the generation before, where the topic has moved and the daemon knows it.
      on_the_way: how many messages have a number and are not known to be sent.
    """
    last = max(opened.last_sequence_id, -1 if before is None else before)
    if last >= standing.next_number:
        detail = (
            f"topic {topic} has message {last} of producer {standing.producer}, and this database has only given"
            f" numbers below {standing.next_number}: it is older than what it has sent, as if it came from a backup"
        )
        hint = "delete from the outbox what the topic has; then plainsong outbox decide --resend"
        raise OutboxInDoubt(detail, hint=hint, topic=topic)
    if standing.has_moved(opened):
        is_known = before is not None
        why = f"topic {topic} was deleted and made anew, and the daemon does not know any more what it had"
    else:
        is_known = opened.epoch > standing.epoch and opened.last_sequence_id >= standing.last_sent
        why = f"the daemon knows less of producer {standing.producer} of topic {topic} than it did"
    if on_the_way and not is_known:
        raise OutboxInDoubt(f"{why}; {on_the_way} messages were on the way", hint=DECIDE, topic=topic)
