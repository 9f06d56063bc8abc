"""The settings of topics, of their commits, of the janitor and of the second copy, by section."""

from __future__ import annotations

from dataclasses import dataclass

from plainsong.protocol.requests import MAX_TTL_S
from storage.settings import (
    CENTURY_S,
    GIB,
    KIB,
    MIB,
    choice,
    count,
    file_name,
    milliseconds,
    seconds,
    size,
    text,
    whole_seconds,
)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The topics, each served by one actor while it is open."""

    chain_secret_file: str = file_name(
        "The file with the secrets that sign the heads of chained topics, in the form of Standard Webhooks: whsec_ "
        "and 24 to 64 random bytes in base64, one line, or two during a rotation; empty: heads are not signed.",
    )
    default_ttl_s: int = whole_seconds(
        604_800,
        "The time to live of a topic created without one; 7 days by default.",
        small="messages expire before slow consumers read them",
        large="the disk fills with messages that no consumer needs",
        low=1,
        high=MAX_TTL_S,
    )
    max_message_bytes: int = size(
        8 * MIB,
        "The largest message; beyond it the answer is 413 message_too_large.",
        small="producers must split their messages",
        large="single messages fill pages and caches",
        low=1,
        high=1 * GIB,
    )
    idle_s: float = seconds(
        300.0,
        "How long a topic without requests stays loaded.",
        small="rarely used topics are loaded from disk each time",
        large="idle topics use memory",
        low=0.1,
        high=86_400.0,
    )
    max_open: int = count(
        10_000,
        "Topics loaded at once; beyond it the one that was idle longest is closed, or the answer is 503 overloaded.",
        small="topics displace each other, and each load reads the disk",
        large="memory grows with the number of topics in use",
        high=1_000_000,
    )
    mailbox_requests: int = count(
        4096,
        "Queued requests per topic; beyond it the answer is 503 overloaded.",
        small="bursts are refused",
        large="requests queue for seconds when the disk is slow",
        high=1_000_000,
    )
    mailbox_bytes: int = size(
        64 * MIB,
        "Queued bytes of messages per topic; beyond it the answer is 503 overloaded.",
        small="bursts of large requests are refused",
        large="one busy topic uses much of http.max_inflight_bytes",
        low=KIB,
        high=64 * GIB,
    )
    checkpoint_rows: int = count(
        10_000,
        "A topic writes a checkpoint of its counts and positions after this many rows, so that loading it reads at "
        "most these.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        high=100_000_000,
    )
    max_parked_polls: int = count(
        10_000,
        "Long polls that may wait per topic; beyond it the answer is 503 overloaded.",
        small="consumers are refused",
        large="waiting consumers use memory",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """One group of requests made durable by one write."""

    max_requests: int = count(
        1024,
        "Requests in one commit; further ones wait for the next.",
        small="each synced write carries less, and throughput falls with the disk's latency",
        large="the first request of a commit waits until the last is processed",
        high=65_536,
    )
    max_bytes: int = size(
        8 * MIB,
        "Bytes of rows in one commit; a larger request gets a commit of its own.",
        small="each synced write carries less",
        large="all requests of the commit wait for one long write",
        low=KIB,
        high=1 * GIB,
    )


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """The janitor, which removes rows that no request can see."""

    interval_s: float = seconds(
        60.0,
        "The pause between two rounds of cleaning.",
        small="each round finds little to remove",
        large="expired messages take disk space for longer",
        low=0.01,
        high=86_400.0,
    )
    delete_grace_s: int = whole_seconds(
        3_600,
        "How long the rows of a deleted topic are kept, so that it can be restored; an hour by default.",
        small="an accidental deletion cannot be undone",
        large="deleted topics take disk space for longer",
        low=0,
        high=CENTURY_S,
    )
    step_rows: int = count(
        200,
        "Rows removed in one step of cleaning; publishes and polls run between the steps.",
        small="cleaning cannot keep up with a busy topic's expiry",
        large="publishes wait longer during a step",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """A second copy of the store in an object store, if storage.kind is leveldb."""

    to: str = text(
        "",
        "URL of the copy, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:/path; credentials, "
        "region and endpoint come from the environment (AWS_ACCESS_KEY_ID, ...). Empty: no copy.",
        # Loose, since an error would quote a URL with credentials in it; opening refuses that without a quote.
        pattern=r"(?:(?:s3://|gs://|az://|file:/)\S*)?",
        expected="s3://bucket/prefix, gs://..., az://... or file:/path",
    )
    mode: str = choice(
        "async",
        "async: an answer does not wait for the copy. sync: a change is answered, and visible, only once it is in the "
        "copy too; while the object store does not answer, changes are refused, and polls are served.",
        "async",
        "sync",
    )
    uploads: int = count(
        4,
        "Objects that are sent at the same time.",
        small="with sync, a slow object store limits the rate",
        large="more requests, and more memory",
        low=1,
        high=8,
    )
    interval_ms: int = milliseconds(
        1000,
        "The longest time that a commit waits before it is sent; with sync it does not wait.",
        small="many small objects, each of which costs a request",
        large="the commits of this time are lost with the machine",
        low=10,
        high=3_600_000,
    )
    segment_bytes: int = size(
        4 * MIB,
        "Bytes of commits in one object, before compression; once this much waits, it is sent without further delay.",
        small="many small objects, each of which costs a request",
        large="more memory, and an object takes longer to send",
        low=64 * KIB,
        high=256 * MIB,
    )
    backlog_bytes: int = size(
        128 * MIB,
        "Bytes of commits that wait in memory during an outage of the object store; beyond this the copy has a gap, and "
        "later commits can be restored only once a new base is complete.",
        small="a short outage costs a new base",
        large="more memory during an outage",
        low=4 * MIB,
        high=64 * GIB,
    )
    base_every_h: int = count(
        24,
        "Hours between two complete copies of the store.",
        small="the whole store is read and sent often",
        large="a restore reads the log of up to this many hours",
        high=24 * 365,
    )
    keep_s: int = whole_seconds(
        7 * 86_400,
        "How far back a restore can go; bases and segments that are only needed for older moments are removed after a "
        "new base.",
        small="a mistake that is noticed late cannot be undone",
        large="the object store grows",
        low=0,
        high=CENTURY_S,
    )
    role: str = choice(
        "primary",
        "What a new data directory becomes. primary: the store that is copied. standby: it follows the copy of another "
        "daemon, serves nothing, and can take over. A directory that has a copy keeps its role.",
        "primary",
        "standby",
    )
    lease_s: float = seconds(
        10.0,
        "A standby takes over if the primary has not renewed its lease for this time; the primary renews it three "
        "times in this time. Without a renewal for this time, a primary with a registered standby refuses requests. "
        "At least 1; or 0: a standby takes over only by hand.",
        small="a short outage of the object store stops the service, or makes a standby take over",
        large="the service is unavailable for that long after the loss of a machine",
        low=0,
        high=3_600,
    )
    standby: str = choice(
        "allowed",
        "Whether other daemons may follow this one as standbys. expected: the same as allowed, and it is reported when "
        "there is none. never: they refuse to, and this daemon acknowledges even while it cannot renew its lease.",
        "never",
        "allowed",
        "expected",
    )
    urls: str = text(
        "",
        "URLs at which clients reach this daemon while it is the primary, separated by commas; a standby names them in its "
        "refusals. Empty: the addresses on which it listens.",
        # ASCII without blanks, since a header names them; a host of other letters is written as DNS has it: xn--...
        pattern=r"(?:https?://[!-+\--~]+(?:,\s*https?://[!-+\--~]+)*)?",
        expected="http://host:port, or several, separated by commas",
    )
    timeout_s: float = seconds(
        30.0,
        "The time limit of a request to the object store; with sync, also of an answer that waits for it.",
        small="large objects never arrive over a slow network",
        large="a connection that hangs is noticed late",
        low=0.1,
        high=3_600.0,
    )
