"""``plainsong copy``: copies a deployment from one store to another, while no daemon serves either."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from broker.command.failures import CONTINUES, reported
from broker.command.options import load_settings, parse_topic, until_ctrl_c
from broker.stores import StoreUrl, open_named, open_to_look
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, json_option
from plainsong.cli.output import ProgressLine, counted, echo_json, show_bytes, show_count
from plainsong.protocol.errors import InvalidName
from storage.clock import now_ms
from storage.copying import CopyRequest, CopyRun, refuse_differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from storage.copy_parts import Figures, Part
    from storage.copying import PartComparison
    from storage.hbase.settings import HBaseConfig

_STAGES = {"look": "looking", "write": "copying", "compare": "comparing"}


@click.command(
    cls=Verb,
    examples=[
        "plainsong copy --from leveldb:data --to hbase:localhost:9090",
        "plainsong copy --from hbase:h1:9090,h2:9090?prefix=prod_ \\",
        "    --to leveldb:/var/lib/plainsong shop:orders shop:bills",
        "plainsong copy --dry-run --from leveldb:data --to hbase:localhost:9090",
    ],
)
@click.argument("topics", nargs=-1, metavar="[NS:TOPIC]...")
@click.option("--from", "source", required=True, metavar="STORE", help="leveldb:DIR or hbase:HOST:PORT[?prefix=NAME]")
@click.option("--to", "target", required=True, metavar="STORE", help="Likewise; created if it does not exist.")
@click.option("--dry-run", is_flag=True, help="Show what would be copied; change nothing.")
@click.option("--verify-only", is_flag=True, help="Compare both sides; change nothing.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Read storage.hbase from this TOML file.")
@click.option("--progress/--no-progress", "shown", default=None, help="Show progress; default: on a terminal.")
@json_option
def copy(
    topics: tuple[str, ...],
    source: str,
    target: str,
    dry_run: bool,
    verify_only: bool,
    file: Path | None,
    shown: bool | None,
    as_json: bool,
) -> None:
    """Copy a deployment from one store to another, byte for byte.

    Copies everything, or the topics named, with the transaction service and
    their namespaces. Stop the daemons of both stores first. After an
    interruption, run the same command again: it continues. A daemon refuses a
    store that is only partly copied. At the end both sides are read and
    compared.
    """
    config = load_settings(file, None, None, ()).config
    settings = config.storage.hbase
    try:
        urls = [StoreUrl.parse(each, settings.table_prefix) for each in (source, target)]
        asked = CopyRequest(str(urls[0]), tuple(sorted({parse_topic(each) for each in topics})) or None)
    except (ValueError, InvalidName) as error:
        raise CommandFailed(str(error), code=Exit.USAGE) from error
    if urls[0] == urls[1]:
        raise CommandFailed("source and target are the same store", code=Exit.USAGE)
    instead = "dry-run" if dry_run else "verify" * verify_only
    with reported(CONTINUES), CopyReport(as_json=as_json, shown=shown) as report:
        trio.run(until_ctrl_c, partial(_copy, urls[0], urls[1], asked, settings, report, instead))


async def _copy(
    source_url: StoreUrl,
    target_url: StoreUrl,
    asked: CopyRequest,
    settings: HBaseConfig,
    report: CopyReport,
    instead: str,
) -> None:
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_named(source_url, settings, make=False))
        if instead == "dry-run":
            target = await stack.enter_async_context(open_to_look(target_url, settings))
        else:
            target = await stack.enter_async_context(open_named(target_url, settings, make=not instead))
        copying = CopyRun(source, target, asked, on_rows=report.step)
        if instead == "dry-run":
            found = await copying.look()
            await copying.refuse(found)
            report.looked(found)
        elif instead:
            report.compared(compared := await copying.verify(), "compared")
            refuse_differences(compared)
        else:
            done = await copying.run(now_ms)
            report.compared(done or [], "copied") if done is not None else report.done_before()


class CopyReport:
    """The output of a copy, as text or JSON; leaving its ``with`` block clears the progress line.

    Args:
      shown: True to show progress; None: on a terminal.
    """

    def __init__(self, *, as_json: bool, shown: bool | None) -> None:
        self._as_json = as_json
        self._shown = (sys.stderr.isatty() if shown is None else shown) and not as_json
        self._rows: dict[str, int] = dict.fromkeys(_STAGES, 0)
        self._stage = ""
        self._line = ProgressLine()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._line.clear()

    def step(self, stage: str, rows: int) -> None:
        """Count rows, from any thread."""
        with self._lock:
            self._rows[stage] += rows
            if not (self._shown and self._line.is_due(time.monotonic(), at_once=stage != self._stage)):
                return
            self._stage = stage
            of = f" of {show_count(self._rows['look'])}" if stage != "look" else ""
            self._line.rewrite(f"{_STAGES[stage]}: {show_count(self._rows[stage])}{of} rows", color=None)

    def looked(self, found: Mapping[Part, Figures]) -> None:
        """Show what would be copied."""
        self._line.clear()
        rows = [(part.label, figures, None) for part, figures in found.items()]
        self._table(rows)
        self._end("would copy", "dry-run", [figures for _, figures, _ in rows], same=None)

    def compared(self, compared: Sequence[PartComparison], verb: str) -> None:
        """Show what was copied or compared, with the digests of both sides."""
        self._line.clear()
        self._table([(each.part.label, each.source, each.target) for each in compared])
        self._end(verb, verb, [each.source for each in compared], same=all(each.is_same for each in compared))

    def done_before(self, what: str = "copy", hint: str = " (--verify-only compares)") -> None:
        """Report that an earlier run has completed this copy, and that nothing was changed."""
        self._line.clear()
        if self._as_json:
            echo_json({"event": "done-before"})
        else:
            click.echo(f"this {what} is already done; nothing was changed{hint}")

    def _table(self, rows: Sequence[tuple[str, Figures, Figures | None]]) -> None:
        if self._as_json:
            for label, source, target in rows:
                sides = {"target": _json(target), "same": source.digest == target.digest} if target is not None else {}
                echo_json({"event": "part", "part": label, "source": _json(source), **sides})
            return
        head = ("PART", ">ROWS", ">BYTES", "DIGEST", *(("TARGET",) if rows and rows[0][2] is not None else ()))
        cells = [
            (label, show_count(source.rows), show_bytes(source.size), source.digest, *_side(source, target))
            for label, source, target in rows
        ]
        output.echo_lines(output.table(head, cells, columns=200))

    def _end(self, says: str, event: str, figures: Sequence[Figures], *, same: bool | None) -> None:
        rows, size = sum(each.rows for each in figures), sum(each.size for each in figures)
        if self._as_json:
            line = {"event": event, "parts": len(figures), "rows": rows, "bytes": size}
            echo_json(line if same is None else {**line, "same": same})
        else:
            verdict = {None: "", True: ": both sides are the same", False: ": the two sides DIFFER"}[same]
            click.echo(
                f"{says} {counted(rows, 'row')}, {show_bytes(size)}, in {counted(len(figures), 'part')}{verdict}"
            )


def _json(figures: Figures) -> dict[str, object]:
    return {"rows": figures.rows, "bytes": figures.size, "digest": figures.digest}


def _side(source: Figures, target: Figures | None) -> tuple[str, ...]:
    if target is None:
        return ()
    return ("same" if source.digest == target.digest else f"DIFFERS: {counted(target.rows, 'row')}, {target.digest}",)
