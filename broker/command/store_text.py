"""How ``plainsong store`` shows rows and summaries: lines for people, objects for programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.inspect.describe import DescribedRow
    from storage.inspect.explain import GenerationSummary, Summary, TopicSummary

_MAX_SHOWN_BYTES = 60


def row_line(row: DescribedRow) -> str:
    """One row as one line."""
    where = f"{row.name} g{row.generation}" if row.name is not None else ""
    if row.problem:
        where = where or row.key[:_MAX_SHOWN_BYTES].hex()
        return f"{row.table.name.lower():8} {where}  DOES NOT PARSE: {row.problem}"
    said = {name: value for name, value in row.fields.items() if name not in ("payload", "payload_bytes")}
    text = " ".join(f"{name}={value}" for name, value in said.items() if value is not None)
    return f"{row.kind:8} {where}  {text}{_payload(row)}"


def _payload(row: DescribedRow) -> str:
    payload = row.message.payload if row.message is not None else None
    if payload is None:
        return ""
    shown = repr(payload[:_MAX_SHOWN_BYTES])[1:]
    return f"  {len(payload)} bytes {shown}{'…' if len(payload) > _MAX_SHOWN_BYTES else ''}"


def summary_json(summary: Summary) -> dict[str, object]:
    """A summary, ready for JSON."""
    return {
        "topics": [
            {
                "namespace": name.namespace,
                "topic": name.topic,
                "generation": topic.metadata.generation if topic.metadata is not None else None,
                "deleted_ms": topic.metadata.deleted_ms if topic.metadata is not None else None,
                "properties": topic.metadata.properties.stored() if topic.metadata is not None else None,
                "generations": [
                    {
                        "generation": number,
                        "messages": rows.messages,
                        "references": rows.references,
                        "payload_rows": rows.payload_rows,
                        "bytes": rows.bytes,
                        "first_ms": rows.first_ms,
                        "last_ms": rows.last_ms,
                        "rolled_back": rows.rolled_back,
                        "invalid": rows.invalid,
                        "readers": rows.readers,
                        "producers": rows.producers,
                        "undecided_pointers": rows.pointers,
                        "oldest_pointer": rows.oldest_pointer,
                        "stored_unpublished": rows.stored,
                        "staged_unpublished": rows.staged,
                        "to_be_cleaned": topic.cleaned(number),
                    }
                    for number, rows in sorted(topic.generations.items())
                ],
            }
            for name, topic in sorted(summary.topics.items())
        ],
        "tables": {
            table.name.lower(): {
                "rows": counted.rows,
                "bytes": counted.bytes,
                "unparseable": counted.unparseable,
                "examples": [row.shown() for row in counted.examples],
                "stopped": counted.stopped or None,
            }
            for table, counted in summary.tables.items()
        },
        "transactions": {
            "service": summary.pruning.authority,
            "in_progress": summary.pruning.transactions,
            "invalid": len(summary.pruning.invalid),
            "oldest_invalid": min(summary.pruning.invalid, default=None),
            "safe_bound": summary.pruning.safe_bound,
            "last_pass_ms": summary.pruning.last_pass_ms,
            "oldest_referenced": _oldest(summary),
        },
    }


def summary_text(summary: Summary) -> str:
    """A summary for people."""
    lines = [f"{len(summary.topics)} topics" if summary.topics else "no topics"]
    for name, topic in sorted(summary.topics.items()):
        lines.append(f"{name}  {_state(topic)}")
        lines += [_generation_line(topic, number) for number in sorted(topic.generations)]
    lines += ["", *_transactions(summary), ""]
    for table, counted in summary.tables.items():
        lines.append(
            f"{table.name.lower():8}  {counted.rows} rows, {counted.bytes} bytes, {counted.unparseable} do not parse"
        )
        lines += [f"          {row_line(row)}" for row in counted.examples]
    return "\n".join(lines)


def _oldest(summary: Summary) -> int | None:
    """The lowest write pointer any topic has not forgotten."""
    known = (rows.oldest_pointer for topic in summary.topics.values() for rows in topic.generations.values())
    return min((pointer for pointer in known if pointer is not None), default=None)


def _transactions(summary: Summary) -> list[str]:
    """What is needed for pruning the invalid list by hand."""
    pruning = summary.pruning
    lines = [
        f"transactions  service {pruning.authority or 'never chosen'}, {pruning.transactions} in progress, "
        f"{len(pruning.invalid)} pointers invalid"
    ]
    if pruning.invalid:
        lines.append(f"              oldest invalid pointer {min(pruning.invalid)}")
    oldest = _oldest(summary)
    if oldest is not None:
        lines.append(f"              oldest pointer that a topic still has rows of {oldest}")
    if pruning.safe_bound is None or pruning.last_pass_ms is None:
        lines.append("              no pass over all topics was complete yet: nothing is safe to prune")
    else:
        lines.append(
            f"              safe to prune up to {pruning.safe_bound}, by the pass of {_time(pruning.last_pass_ms)}"
        )
    return lines


def _state(topic: TopicSummary) -> str:
    metadata = topic.metadata
    if metadata is None:
        return "has rows, but no metadata row that can be read"
    if metadata.deleted_ms is not None:
        return f"generation {metadata.generation}, deleted {_time(metadata.deleted_ms)}"
    return f"generation {metadata.generation}, ttl {metadata.properties.ttl_s} s"


def _generation_line(topic: TopicSummary, number: int) -> str:
    rows: GenerationSummary = topic.generations[number]
    parts = [f"  g{number}: {rows.messages} messages, {rows.payload_rows} payload rows, {rows.bytes} bytes"]
    if rows.first_ms is not None and rows.last_ms is not None:
        parts.append(f"{_time(rows.first_ms)} to {_time(rows.last_ms)}")
    for count, what in (
        (rows.readers, "readers"),
        (rows.producers, "producers"),
        (rows.references, "rows for stored messages"),
        (rows.stored, "stored and not published"),
        (rows.staged, "staged and not published"),
        (rows.rolled_back, "rolled back"),
        (rows.invalid, "of invalid transactions"),
        (topic.cleaned(number), "to be cleaned"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if rows.oldest_pointer is not None:
        parts.append(f"{rows.pointers} undecided write pointers, the oldest {rows.oldest_pointer}")
    return ", ".join(parts)


def _time(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
