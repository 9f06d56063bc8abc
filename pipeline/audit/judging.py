"""From messages to fields: each is parsed and checked by SQL functions alone, and told its reason when it is bad.

The types are judged as they stand in the JSON, never converted: the number 5 is no user. That is why the payload is
parsed into a variant instead of a schema, which would make strings of numbers without a word. Nothing here raises,
whatever the payload holds; and nothing depends on when it runs, so that a batch judged again is judged the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  as everyone calls it

from pipeline.audit.messages import (
    ACCESS,
    ACCESS_NAMES,
    ACCESSES,
    CHANGES,
    COMMON_NAMES,
    EARLIEST_MS,
    ENTITY_PATTERN,
    MAX_AHEAD_MS,
    METADATA,
    NAME_PATTERN,
    TYPES,
    VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

#: Every field that the shape names; of each its variant, and the variant's type in SQL, get a column.
FIELDS: Final = ("version", "type", "time", *COMMON_NAMES, *ACCESS_NAMES, "access", "entity", *CHANGES)

_EMPTY_PROPERTIES: Final = "map_from_arrays(cast(array() as array<string>), cast(array() as array<string>))"
_EMPTY_TAGS: Final = "cast(array() as array<string>)"
_MAX_DETAIL: Final = 200
#: The last millisecond of the year 9999. A time beyond it is absurd, but must not raise before that is said.
_LAST_MS: Final = 253_402_300_799_999


def judged(messages: DataFrame) -> DataFrame:
    """Rows of the connector with what they say.

    Takes namespace, topic, message_id, publish_timestamp and payload. Gives topic (`namespace:name`), message_id,
    published, payload, reason and detail (null when the message is good), and the fields, of use when it is:
    type, time, namespace, user, program, run, access, entity, previous, added, removed.
    """
    fields = _fields(_values(messages))
    verdict = F.coalesce(
        *(
            F.when(wrong, F.named_struct(F.lit("reason"), reason, F.lit("detail"), detail))
            for wrong, reason, detail in _objections()
        )
    )
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
    """The payload as one variant, `value`; null when it is no JSON.

    The parser stops at the end of the first value and says nothing of what follows. What follows cannot close a list
    and an object both: so the text is parsed within one of each, and nothing but it may be in the list.
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
    found = values.select(
        "*",
        F.schema_of_variant("value").alias("kind"),
        *(F.try_variant_get("value", f"$.{name}", "variant").alias(f"its_{name}") for name in FIELDS),
    )
    return found.select("*", *(F.schema_of_variant(f"its_{name}").alias(f"{name}_kind") for name in FIELDS))


def _objections() -> Iterator[tuple[Column, Column, Column]]:
    """What may be wrong, in the order in which it is looked for: when, the reason, the detail."""
    nothing = F.lit(None).cast("string")
    yield F.col("text").isNull(), _reason("not_utf8"), nothing
    yield F.col("value").isNull(), _reason("not_json"), nothing
    yield ~F.col("kind").startswith("OBJECT<"), _reason("not_an_object"), _detail(F.col("kind"))
    yield from _unfit("version", "BIGINT")
    yield _number("version") != VERSION, _reason("unknown_version"), _detail(_text("version"))
    yield from _unfit("type", "STRING")
    yield ~_text("type").isin(*TYPES), _reason("unknown_type"), _detail(_text("type"))
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
    yield _is(METADATA) & unchanged, _reason("missing_field"), _detail(F.lit("added or removed"))
    latest = F.unix_millis("published") + MAX_AHEAD_MS
    absurd = (_number("time") < EARLIEST_MS) | (_number("time") > latest)
    yield absurd, _reason("absurd_time"), _detail(_text("time"))


def _unfit(
    name: str, kind: str, pattern: str | None = None, *, of: str | None = None
) -> Iterator[tuple[Column, Column, Column]]:
    """A field that every message, or every one `of` a type, must have: missing, of another type, of another form."""
    asked = F.lit(True) if of is None else _is(of)
    detail = _detail(F.lit(name))
    yield asked & _absent(name), _reason("missing_field"), detail
    yield asked & (F.col(f"{name}_kind") != kind), _reason("wrong_type"), detail
    if pattern is not None:
        yield asked & ~_text(name).rlike(rf"\A(?:{pattern})\z"), _reason("bad_value"), detail


def _unfit_change(part: str) -> Iterator[tuple[Column, Column, Column]]:
    """A part of a metadata change that is there, and is no object of properties (strings by name) and tags (strings)."""
    there = _is(METADATA) & ~_absent(part)
    its = f"its_{part}"
    strings = "schema_of_variant(each) = 'STRING'"
    properties = f"forall(map_values(try_variant_get({its}, '$.properties', 'map<string,variant>')), each -> {strings})"
    tags = f"forall(try_variant_get({its}, '$.tags', 'array<variant>'), each -> {strings})"
    yield there & ~F.col(f"{part}_kind").startswith("OBJECT<"), _reason("wrong_type"), _detail(F.lit(part))
    for name, fits in (("properties", properties), ("tags", tags)):
        kind = F.schema_of_variant(F.try_variant_get(its, f"$.{name}", "variant"))
        given = F.coalesce(kind, F.lit("VOID")) != "VOID"
        wrong = there & given & ~F.coalesce(F.expr(fits), F.lit(False))
        yield wrong, _reason("wrong_type"), _detail(F.lit(f"{part}.{name}"))


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
    return F.try_variant_get(f"its_{name}", "$", "string")


def _number(name: str) -> Column:
    return F.try_variant_get(f"its_{name}", "$", "bigint")


def _reason(reason: str) -> Column:
    return F.lit(reason)


def _detail(detail: Column) -> Column:
    return detail.cast("string")
