"""``audit generate``: audit messages to try it with, to a topic or as lines of JSON."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.audit.generator import payloads
from pipeline.job import Run, job_options
from plainsong.cli.output import show_count
from plainsong.cli.verb import Verb

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Progress is told, and metrics are written, after so many.
TELL_EVERY = 10_000


class Count(click.ParamType[int]):
    """A whole number, also as 1e6."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, from 0 to 10^12."""
        try:
            number = float(str(value))
        except ValueError:
            number = -1
        if not 0 <= number <= 1e12 or number != int(number):
            self.fail(f"{str(value)[:40]!r} is no whole number; use for example 1000 or 1e6", param, ctx)
        return int(number)


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run audit generate --messages 1e4 --topic audit --create",
        "plainsong pipeline run audit generate --messages 1e6 --seed 7 --bad 0.001 --out audit.jsonl",
    ],
)
@click.option("--messages", type=Count(), required=True, metavar="N", help="How many, such as 1e6.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Equal seeds, equal messages.")
@click.option(
    "--bad",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    metavar="PART",
    help="Part of them unreadable.",
)
@click.option("--topic", metavar="NAME", help="Publish them there, each once, also when started again.")
@click.option("--create", is_flag=True, help="Make the topic if it is not there.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write a line each; - is standard output.",
)
@job_options("audit")
def generate(run: Run, messages: int, seed: int, bad: float, topic: str | None, create: bool, out: Path | None) -> None:
    """Make audit messages: programs, runs, users, metadata edits, some bad.

    The same options make the same messages. Publishing goes on where it was
    killed, under a producer named by the options.
    """
    if (topic is None) == (out is None):
        raise click.UsageError("give either --topic or --out")
    if run.dry_run:
        sample = list(islice(payloads(messages, seed, bad=bad), 3))
        run.progress.result(
            f"would make {show_count(messages)} messages for {topic or out}, the first of them:",
            "would",
            messages=messages,
        )
        for each in sample:
            run.progress.result(each.decode(errors="replace"), "sample", payload=each.decode(errors="replace"))
        return
    made = payloads(messages, seed, bad=bad)
    if topic is not None:
        there = _publish(run, made, topic, f"audit-generate-{seed}-{messages}-{bad}", create, messages)
        text = f"published {show_count(messages - there)} messages to {topic}"
        run.progress.result(
            text + (f"; {show_count(there)} were there" if there else ""),
            topic=topic,
            messages=messages - there,
            before=there,
        )
    elif str(out) == "-":
        sys.stdout.buffer.writelines(each + b"\n" for each in made)
    elif out is not None:
        with out.open("wb") as file:
            file.writelines(each + b"\n" for each in _told(run, made, messages, str(out)))
        run.progress.result(f"wrote {show_count(messages)} messages to {out}", out=str(out), messages=messages)


def _publish(run: Run, made: Iterator[bytes], topic: str, producer_name: str, create: bool, messages: int) -> int:
    """Send what is not there yet; how much was there. Raises PlainsongError: what was sent is there, the rest is not."""
    with run.client(topic) as client:
        if create:
            client.create_topic(topic, if_not_exists=True)
        with client.producer(topic, producer_name) as producer:
            there = min(messages, producer.last_sequence_id + 1)
            sent = None
            for number, each in enumerate(_told(run, made, messages, topic)):
                if number >= there:
                    sent = producer.send(each, sequence_id=number)
            producer.flush()
            if sent is not None:
                sent.result()
    return there


def _told(run: Run, made: Iterator[bytes], messages: int, where: str) -> Iterator[bytes]:
    """The same payloads, and how far it is."""
    size = since = 0
    for number, each in enumerate(made, 1):
        yield each
        size += len(each)
        if number % TELL_EVERY == 0 or number == messages:
            run.metrics.add("rows_total", number - since, topic=where)
            run.metrics.add("bytes_total", size, topic=where)
            run.metrics.write()
            run.progress.step(number, of=messages, what=where, last=number == messages)
            size, since = 0, number
