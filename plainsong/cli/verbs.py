"""Every verb of the command line: where it stands and what it says of itself, so that ``--help`` loads none of them."""

from __future__ import annotations

from typing import NamedTuple


class Listed(NamedTuple):
    """A verb as the program lists it."""

    where: str
    """``module:attribute``."""
    says: str
    """One line; the verb's own help begins with the same."""


#: The program's own verbs, in the order people meet them.
SECTIONS: dict[str, dict[str, Listed]] = {
    "Messages": {
        "publish": Listed("plainsong.cli.publish:publish", "Publish messages: arguments, lines, NDJSON, files."),
        "poll": Listed("plainsong.cli.poll:poll", "Read messages of a topic and stop."),
        "tail": Listed("plainsong.cli.tail:tail", "Follow topics: print messages as they come."),
        "on": Listed("plainsong.cli.on:on", "React to each message: run a command, or post it."),
        "peek": Listed("plainsong.cli.peek:peek", "Look at messages: state, size, expiry."),
    },
    "Topics": {
        "topic": Listed("plainsong.cli.topic:topic", "Make, change, list and delete topics."),
        "namespace": Listed("plainsong.cli.namespace:namespace", "Namespaces, and what they say for their topics."),
        "producer": Listed("plainsong.cli.producer:producer", "Producers: whose sequence ids a topic remembers."),
        "reader": Listed("plainsong.cli.reader:reader", "Positions that the daemon keeps for readers."),
        "tx": Listed("plainsong.cli.tx:tx", "Transactions: who holds a topic up, and what to do about it."),
        "outbox": Listed("plainsong.cli.outbox:outbox", "Publish what waits in the outbox of a database."),
        "stats": Listed("plainsong.cli.stats:stats", "How many messages, how large, how old, how fast."),
        "top": Listed("plainsong.cli.top:top", "Watch the topics live."),
    },
    "The daemon": {
        "serve": Listed("broker.command.serve:serve", "Run the daemon until SIGTERM or Ctrl-C."),
        "config": Listed("broker.command.config:config", "Check and show the daemon's settings."),
        "store": Listed("broker.command.store:store", "Look into a stopped data directory, or a store in HBase."),
        "copy": Listed("broker.command.copy:copy", "Copy a deployment from one store to another, byte for byte."),
        "cluster": Listed("plainsong.cli.cluster:cluster", "Instances of one service: who is there, who owns what."),
        "ping": Listed("plainsong.cli.ping:ping", "Ask daemons whether they are there and ready."),
        "doctor": Listed("plainsong.cli.doctor:doctor", "Examine disk, clock, limits and daemon."),
        "bench": Listed("plainsong.cli.bench:bench", "Measure a daemon: rates and latencies."),
    },
    "This program": {
        "context": Listed("plainsong.cli.context:context", "Names for daemons, so that you need no --url."),
        "completion": Listed("plainsong.cli.completion:completion", "Print the completion script of a shell."),
    },
}

VERBS: dict[str, Listed] = {name: listed for section in SECTIONS.values() for name, listed in section.items()}
