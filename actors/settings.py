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
    """Topics, and the limits of each."""

    chain_secret_file: str = file_name(
        "File with the secret that signs the heads of chained topics, as one line in the form of Standard Webhooks: "
        "whsec_ and 24 to 64 random bytes in base64. During a rotation it has two lines. Empty: heads are not signed.",
    )
    default_ttl_s: int = whole_seconds(
        604_800,
        "Time to live of the messages in a topic that is created without one; 7 days by default.",
        small="messages expire before slow consumers read them",
        large="the disk fills with messages that no consumer needs",
        low=1,
        high=MAX_TTL_S,
    )
    max_message_bytes: int = size(
        8 * MIB,
        "Maximum size of a message; a larger one gets 413 message_too_large.",
        small="producers must split their messages",
        large="single messages fill pages and caches",
        low=1,
        high=1 * GIB,
    )
    idle_s: float = seconds(
        300.0,
        "Unload a topic after this long without requests.",
        small="rarely used topics are loaded from disk each time",
        large="idle topics use memory",
        low=0.1,
        high=86_400.0,
    )
    max_open: int = count(
        10_000,
        "Maximum topics loaded at once; a further one replaces the topic that was idle longest, or gets 503 "
        "overloaded if none is idle.",
        small="topics displace each other, and each load reads the disk",
        large="memory grows with the number of topics in use",
        high=1_000_000,
    )
    mailbox_requests: int = count(
        4096,
        "Maximum queued requests per topic; further ones get 503 overloaded.",
        small="bursts are refused",
        large="requests queue for seconds when the disk is slow",
        high=1_000_000,
    )
    mailbox_bytes: int = size(
        64 * MIB,
        "Maximum bytes of queued messages per topic; further requests get 503 overloaded.",
        small="bursts of large requests are refused",
        large="one busy topic uses much of http.max_inflight_bytes",
        low=KIB,
        high=64 * GIB,
    )
    checkpoint_rows: int = count(
        10_000,
        "Rows after which a topic writes a checkpoint of its counts and positions; loading a topic reads at most "
        "this many.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        high=100_000_000,
    )
    max_parked_polls: int = count(
        10_000,
        "Maximum waiting long polls per topic; further ones get 503 overloaded.",
        small="consumers are refused",
        large="waiting consumers use memory",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """Group commit: the requests that one write makes durable."""

    max_requests: int = count(
        1024,
        "Maximum requests per commit; further ones wait for the next.",
        small="each synced write carries less, and throughput falls with the disk's latency",
        large="the first request of a commit waits until the last is processed",
        high=65_536,
    )
    max_bytes: int = size(
        8 * MIB,
        "Maximum bytes of rows per commit; a larger request gets a commit of its own.",
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
        "How long a deleted topic can be restored, because its rows are kept; an hour by default.",
        small="an accidental deletion cannot be undone",
        large="deleted topics take disk space for longer",
        low=0,
        high=CENTURY_S,
    )
    step_rows: int = count(
        200,
        "Rows to remove in one step of cleaning; publishes and polls run between the steps.",
        small="cleaning cannot keep up with a busy topic's expiry",
        large="publishes wait longer during a step",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """A second copy of the store, in an object store; only if storage.kind is leveldb."""

    to: str = text(
        "",
        "URL of the copy, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:/path; credentials, "
        "region and endpoint come from the environment (AWS_ACCESS_KEY_ID, ...). Empty: no copy.",
        # A loose pattern, since an error would quote a URL with credentials. Opening refuses such a URL without quoting.
        pattern=r"(?:(?:s3://|gs://|az://|file:/)\S*)?",
        expected="s3://bucket/prefix, gs://..., az://... or file:/path",
    )
    mode: str = choice(
        "async",
        "async: answers do not wait for the copy. sync: a change is acknowledged, and visible, only once it is in "
        "the copy too; while the object store does not respond, changes are refused and polls are served.",
        "async",
        "sync",
    )
    uploads: int = count(
        4,
        "Maximum concurrent uploads.",
        small="with sync, a slow object store limits the rate",
        large="more requests, and more memory",
        low=1,
        high=8,
    )
    interval_ms: int = milliseconds(
        1000,
        "Maximum time that a commit waits for others to be uploaded with; with sync it does not wait.",
        small="many small objects, each of which costs a request",
        large="if the machine is lost, so are the commits of this time",
        low=10,
        high=3_600_000,
    )
    segment_bytes: int = size(
        4 * MIB,
        "Upload an object as soon as this many bytes of commits are waiting, counted before compression.",
        small="many small objects, each of which costs a request",
        large="more memory, and each upload takes longer",
        low=64 * KIB,
        high=256 * MIB,
    )
    backlog_bytes: int = size(
        128 * MIB,
        "Maximum bytes of commits that wait in memory during an outage of the object store. Beyond it the copy has a "
        "gap, and later commits can be restored only once a new base is complete.",
        small="a short outage costs a new base",
        large="more memory during an outage",
        low=4 * MIB,
        high=64 * GIB,
    )
    base_every_h: int = count(
        24,
        "Hours between two bases, which are complete copies of the store.",
        small="the whole store is read and sent often",
        large="a restore reads the log of up to this many hours",
        high=24 * 365,
    )
    keep_s: int = whole_seconds(
        7 * 86_400,
        "How far back a restore can go. After each new base, older bases and segments that this does not need are "
        "removed.",
        small="a mistake that is noticed late cannot be undone",
        large="the object store grows",
        low=0,
        high=CENTURY_S,
    )
    role: str = choice(
        "primary",
        "Role of a new data directory. primary: its store is copied. standby: it follows the copy of another daemon, "
        "serves no requests, and can take over. A directory that has a copy keeps its role.",
        "primary",
        "standby",
    )
    lease_s: float = seconds(
        10.0,
        "Duration of the primary's lease, which the primary renews three times within it. If the lease runs out, a "
        "standby takes over, and a primary that has a registered standby refuses requests. At least 1, or 0: a "
        "standby takes over only by hand.",
        small="a short outage of the object store interrupts the service, or makes a standby take over",
        large="after the loss of a machine the service is unavailable for that long",
        low=0,
        high=3_600,
    )
    standby: str = choice(
        "allowed",
        "Whether other daemons may follow this one as standbys. allowed: they may. expected: they may, and plainsong "
        "doctor reports if there is none. never: they refuse to, and this daemon continues to acknowledge while it "
        "cannot renew its lease.",
        "never",
        "allowed",
        "expected",
    )
    urls: str = text(
        "",
        "URLs at which clients reach this daemon while it is the primary, comma-separated; a standby names them when "
        "it refuses a request. Empty: the addresses on which it listens.",
        # ASCII without blanks, since a header names them; a host of other letters is written as DNS has it: xn--...
        pattern=r"(?:https?://[!-+\--~]+(?:,\s*https?://[!-+\--~]+)*)?",
        expected="http://host:port, or several, comma-separated",
    )
    timeout_s: float = seconds(
        30.0,
        "Time limit of a request to the object store; with sync, also of an answer that waits for the copy.",
        small="uploads of large objects never finish on a slow network",
        large="a hanging connection is noticed late",
        low=0.1,
        high=3_600.0,
    )
