"""Audit messages of version 1: fields and bounds, and SQL functions that parse a message or find what is wrong with it.

A message is one JSON object in UTF-8. Fields that version 1 does not name are ignored, so that publishers can add fields
without a new version. docs/pipeline.md describes messages for publishers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from pyspark.sql import functions as F  # noqa: N812  as everyone calls it
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

VERSION: Final = 1
ACCESS: Final = "access"
METADATA: Final = "metadata"
TYPES: Final = (ACCESS, METADATA)
READ: Final = "read"
WRITE: Final = "write"
UNKNOWN: Final = "unknown"
ACCESSES: Final = (READ, WRITE, UNKNOWN)
#: An entity is named ``kind:name``; programs access entities of this kind.
DATASET: Final = "dataset"
PROGRAM: Final = "program"
#: Fields that hold names: those of every message, and those that an access has in addition.
COMMON_NAMES: Final = ("namespace", "user")
ACCESS_NAMES: Final = ("program", "run", "dataset")
#: The parts of a metadata change.
CHANGES: Final = ("previous", "added", "removed")
#: Names have 1 to 1024 characters, none of them a control character. The pattern means the same in Java and Python.
NAME_PATTERN: Final = r"[^\x00-\x1f\x7f]{1,1024}"
ENTITY_PATTERN: Final = r"[a-z][a-z0-9_]{0,31}:[^\x00-\x1f\x7f]{1,1024}"
#: Times before 2000, or more than a day after the publish, are refused.
EARLIEST_MS: Final = 946_684_800_000
MAX_AHEAD_MS: Final = 86_400_000
#: One part of a metadata change.
CHANGE: Final = StructType(
    [
        StructField("properties", MapType(StringType(), StringType())),
        StructField("tags", ArrayType(StringType())),
    ]
)


# --- parsing ---------------------------------------------------------------------------------------
#
# JSON types are not converted: the number 5 is not a user. So the payload is parsed into a variant instead of with a
# schema, which would silently convert numbers to strings. No function here raises, for any payload, and none depends
# on the time of the run, so a batch that is parsed again gives the same rows.

#: A condition under which a message is bad, with its reason and detail.
Objection: TypeAlias = "tuple[Column, Column]"
#: The fields of version 1.
TEXTS: Final = ("type", *COMMON_NAMES, *ACCESS_NAMES, "access", "entity")
NUMBERS: Final = ("version", "time")
FIELDS: Final = (*NUMBERS, *TEXTS, *CHANGES)
_EMPTY_PROPERTIES: Final = "map_from_arrays(cast(array() as array<string>), cast(array() as array<string>))"
_EMPTY_TAGS: Final = "cast(array() as array<string>)"
_MAX_DETAIL: Final = 200
#: The last millisecond of the year 9999; Spark would raise for later times before the check refuses them.
_LAST_MS: Final = 253_402_300_799_999


def parsed(messages: DataFrame) -> DataFrame:
    """Parse the messages in rows of the connector.

    It needs namespace, topic, message_id, publish_timestamp and payload. It returns topic (``namespace:name``),
    message_id, published, payload, reason and detail (both null for a good message), and the fields of a good message:
    type, time, namespace, user, program, run, access, entity, previous, added, removed.
    """
    fields = _fields(_values(messages))
    (wrong, first), *others = _objections()
    verdict = F.when(wrong, first)
    for wrong, found in others:
        verdict = verdict.when(wrong, found)
    weighed = fields.select("*", verdict.alias("verdict"))
    return weighed.select(
        "topic",
        "message_id",
        "published",
        "payload",
        F.col("verdict.reason").alias("reason"),
        F.substring(F.col("verdict.detail"), 1, _MAX_DETAIL).alias("detail"),
        _text("type").alias("type"),
        F.timestamp_millis(F.greatest(F.lit(0), F.least(_number("time"), F.lit(_LAST_MS)))).alias("time"),
        *(_text(name).alias(name) for name in (*COMMON_NAMES, "program", "run", "access")),
        F.when(_is(ACCESS), F.concat(F.lit("dataset:"), _text("dataset"))).otherwise(_text("entity")).alias("entity"),
        *(F.when(_is(METADATA), _change(part)).alias(part) for part in CHANGES),
    )


def _values(messages: DataFrame) -> DataFrame:
    """Parse the payload into one variant, ``value``; null if it is not JSON.

    Spark's parser stops after the first value and ignores the rest of the text. To refuse trailing text, it is parsed
    twice, as an item of a list and as a member of an object: no text can close both. It must be the list's only item.
    """
    texts = messages.select(
        F.concat_ws(":", "namespace", "topic").alias("topic"),
        "message_id",
        F.col("publish_timestamp").alias("published"),
        "payload",
        F.try_validate_utf8(F.col("payload").cast("string")).alias("text"),
    )
    listed = F.try_parse_json(F.concat(F.lit("["), F.col("text"), F.lit("]")))
    wrapped = F.try_parse_json(F.concat(F.lit('{"it":'), F.col("text"), F.lit("}")))
    parsed = texts.select("*", listed.alias("listed"), wrapped.isNotNull().alias("closed"))
    alone = F.col("closed") & F.try_variant_get("listed", "$[1]", "variant").isNull()
    first = F.try_variant_get("listed", "$[0]", "variant")
    return parsed.select("topic", "message_id", "published", "payload", "text", F.when(alone, first).alias("value"))


def _fields(values: DataFrame) -> DataFrame:
    """Add columns with the variant, type and text or number of every field, so that each is computed once."""
    found = values.select(
        "*",
        F.schema_of_variant("value").alias("kind"),
        *(F.try_variant_get("value", f"$.{name}", "variant").alias(f"its_{name}") for name in FIELDS),
    )
    return found.select(
        "*",
        *(F.schema_of_variant(f"its_{name}").alias(f"{name}_kind") for name in FIELDS),
        *(F.try_variant_get(f"its_{name}", "$", "string").alias(f"{name}_text") for name in TEXTS),
        *(F.try_variant_get(f"its_{name}", "$", "bigint").alias(f"{name}_number") for name in NUMBERS),
    )


def _objections() -> Iterator[Objection]:
    """Yield the conditions, in the order in which they are checked."""
    yield F.col("text").isNull(), _for("not_utf8")
    yield F.col("value").isNull(), _for("not_json")
    yield ~F.col("kind").startswith("OBJECT<"), _for("not_an_object", F.col("kind"))
    yield from _unfit("version", "BIGINT")
    yield _number("version") != VERSION, _for("unknown_version", F.try_variant_get("its_version", "$", "string"))
    yield from _unfit("type", "STRING")
    yield ~_text("type").isin(*TYPES), _for("unknown_type", _text("type"))
    yield from _unfit("time", "BIGINT")
    for name in COMMON_NAMES:
        yield from _unfit(name, "STRING", NAME_PATTERN)
    for name in ACCESS_NAMES:
        yield from _unfit(name, "STRING", NAME_PATTERN, of=ACCESS)
    yield from _unfit("access", "STRING", "|".join(ACCESSES), of=ACCESS)
    yield from _unfit("entity", "STRING", ENTITY_PATTERN, of=METADATA)
    for part in CHANGES:
        yield from _unfit_change(part)
    unchanged = _absent("added") & _absent("removed")
    yield _is(METADATA) & unchanged, _for("missing_field", F.lit("added or removed"))
    latest = F.unix_millis("published") + MAX_AHEAD_MS
    absurd = (_number("time") < EARLIEST_MS) | (_number("time") > latest)
    yield absurd, _for("absurd_time", _number("time"))


def _unfit(name: str, kind: str, pattern: str | None = None, *, of: str | None = None) -> Iterator[Objection]:
    """Yield the conditions on a field that every message must have, or every message of the type ``of``."""
    asked = F.lit(True) if of is None else _is(of)
    yield asked & _absent(name), _for("missing_field", F.lit(name))
    yield asked & (F.col(f"{name}_kind") != kind), _for("wrong_type", F.lit(name))
    if pattern is not None:
        yield asked & ~_text(name).rlike(rf"\A(?:{pattern})\z"), _for("bad_value", F.lit(name))


def _unfit_change(part: str) -> Iterator[Objection]:
    """Yield the condition that a part of a change is not an object of properties (strings by name) and tags (strings)."""
    there = _is(METADATA) & ~_absent(part)
    its = f"its_{part}"
    strings = "schema_of_variant(each) = 'STRING'"
    properties = f"forall(map_values(try_variant_get({its}, '$.properties', 'map<string,variant>')), each -> {strings})"
    tags = f"forall(try_variant_get({its}, '$.tags', 'array<variant>'), each -> {strings})"
    yield there & ~F.col(f"{part}_kind").startswith("OBJECT<"), _for("wrong_type", F.lit(part))
    for name, fits in (("properties", properties), ("tags", tags)):
        kind = F.schema_of_variant(F.try_variant_get(its, f"$.{name}", "variant"))
        given = F.coalesce(kind, F.lit("VOID")) != "VOID"
        wrong = there & given & ~F.coalesce(F.expr(fits), F.lit(False))
        yield wrong, _for("wrong_type", F.lit(f"{part}.{name}"))


def _change(part: str) -> Column:
    properties = F.try_variant_get(f"its_{part}", "$.properties", "map<string,string>")
    tags = F.try_variant_get(f"its_{part}", "$.tags", "array<string>")
    return F.struct(
        F.coalesce(properties, F.expr(_EMPTY_PROPERTIES)).alias("properties"),
        F.coalesce(tags, F.expr(_EMPTY_TAGS)).alias("tags"),
    )


def _is(type_name: str) -> Column:
    return _text("type") == type_name


def _absent(name: str) -> Column:
    return F.coalesce(F.col(f"{name}_kind"), F.lit("VOID")) == "VOID"


def _text(name: str) -> Column:
    return F.col(f"{name}_text")


def _number(name: str) -> Column:
    return F.col(f"{name}_number")


def _for(reason: str, detail: Column | None = None) -> Column:
    text = F.lit(None) if detail is None else detail
    return F.named_struct(F.lit("reason"), F.lit(reason), F.lit("detail"), text.cast("string"))
