"""Options of reading: their meaning, and refusals that name the option that was probably meant."""

from __future__ import annotations

import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from pyspark_plainsong.columns import BadSchema, check_schema, read_schema
from pyspark_plainsong.options import BadOption, ReadOptions, TopicBound, WriteOptions
from pyspark_plainsong.source import DefaultSource

NEEDED = {"url": "http://127.0.0.1:7420", "namespace": "demo", "subscribe": "orders"}
ID = "0000018bcfe56800000200000000000000000000"


def parse(streaming: bool = False, **given: str) -> ReadOptions:
    return ReadOptions.parse({name.lower(): value for name, value in {**NEEDED, **given}.items()}, streaming=streaming)


def refusal(streaming: bool = False, **given: str) -> str:
    with pytest.raises(BadOption) as caught:
        parse(streaming, **given)
    return str(caught.value)


def test_the_defaults_are_earliest_committed_and_failing_on_loss():
    options = parse()
    assert options.connection.urls == ("http://127.0.0.1:7420",)
    assert (options.starting.default, options.ending.default) == ("earliest", "latest")
    assert (options.isolation, options.fail_on_data_loss, options.include_transaction) == ("committed", True, False)
    assert options.topics == ("orders",)


@pytest.mark.parametrize("missing", ["url", "subscribe"])
def test_missing_options_are_named(missing):
    given = {name: value for name, value in NEEDED.items() if name != missing}
    with pytest.raises(BadOption, match=f"option {missing} is missing"):
        ReadOptions.parse(given, streaming=False)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("maxRecordPerPartition", "maxRecordsPerPartition"),
        ("topics", "subscribe"),
        ("kafka.bootstrap.servers", "url"),
        ("startingOffsetsByTimestamp", "startingTimestamp"),
        ("topicsPattern", "subscribePattern"),
        ("authtokenfile", "auth.tokenFile"),
        ("option.url", "keeps no options of a Python source"),
        ("pushFilters", "those for reading a batch are url, namespace"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_probably_meant(unknown, meant):
    assert meant in refusal(**{unknown: "1"})


def test_a_table_and_a_stream_are_refused_when_they_are_loaded():
    for more in ({}, {"endingtimestamp": "1"}, {"maxoffsetsPerTrigger": "1"}):
        assert DefaultSource({**NEEDED, **more}).schema().names
    for more, says in (
        ({"startingoffset": "x"}, "did you mean startingOffsets?"),
        ({"fetchsize": "x"}, "fetchSize is 'x'"),
        ({"maxoffsetspertrigger": "0"}, "maxOffsetsPerTrigger is '0'"),
        ({"maxoffsetspertrigger": "1", "endingoffsets": ID}, "endingOffsets is for reading a batch"),
    ):
        with pytest.raises(BadOption, match=says):
            DefaultSource({**NEEDED, **more})  # as Spark does in load(), even with a schema of the user's
    with pytest.raises(BadOption, match="option subscribe is missing"):
        DefaultSource({"url": NEEDED["url"]}).schema()


def test_options_that_a_write_may_have_are_left_to_the_write():
    for more in ({}, {"topic": "orders"}, {"topic": "orders", "subscribe": "orders"}, {"storebatchsize": "x"}):
        DefaultSource({"url": NEEDED["url"], **more})


def test_options_of_another_use_are_refused_as_such():
    assert "endingOffsets is for reading a batch, not for reading a stream" in refusal(True, endingOffsets="latest")
    assert "maxOffsetsPerTrigger is for reading a stream" in refusal(maxOffsetsPerTrigger="5")
    assert "its topics are in subscribe" in refusal(topic="orders")
    assert "headers and routing_key are columns" in refusal(includeHeaders="true")
    with pytest.raises(BadOption, match="subscribe is for reading, not for writing a batch"):
        WriteOptions.parse(NEEDED, streaming=False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"subscribePattern": "o.*"}, "exclude each other"),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "exclude each other"),
        ({"endingOffsets": "latest", "endingTimestamp": "1"}, "exclude each other"),
        ({"startingOffsets": "latest"}, "always empty"),
        ({"endingOffsets": "earliest"}, "always empty"),
        ({"startingTimestamp": "2000", "endingTimestamp": "1000"}, "the start is after the end"),
        ({"startingOffsets": '{"prices": "earliest"}'}, "which subscribe does not"),
        ({"startingOffsets": '{"other:orders": "earliest"}'}, "not of the namespace demo"),
        ({"startingOffsets": '{"orders": 5000}'}, "times have options of their own"),
        ({"startingOffsets": f'{{"orders": "{ID}"}}', "endingTimestamp": "1"}, "of topic orders is after the end"),
        ({"startingOffsets": f'{{"orders": "{ID}"}}', "endingOffsets": "00" * 20}, "of topic orders is after"),
        ({"startingTimestamp": "²"}, "ISO-8601"),
        ({"url": "http://h:99999"}, "Port out of range"),
        ({"startingOffsets": "0000"}, "40 hex digits"),
        ({"startingOffsets": "{"}, "not JSON"),
        ({"startingTimestamp": "yesterday"}, "ISO-8601"),
        ({"startingTimestamp": "1769817600"}, "is it in seconds, or a date"),
        ({"endingTimestamp": "20260131"}, "is it in seconds, or a date"),
        ({"isolation": "serializable"}, "committed, uncommitted"),
        ({"fetchSize": "0"}, "1 to 1000000"),
        ({"fetchSize": "many"}, "a whole number"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"url": "127.0.0.1:7420"}, "http://host:port"),
        ({"url": "http://me:secret@host"}, "tokenFile"),
        ({"url": "http://host:1", "tokenFile": "t"}, "unencrypted"),
        ({"url": "https://host", "tokenFile": "t", "auth.tokenFile": "t"}, "auth.tokenFile"),
        ({"namespace": "de-mo"}, "underscores"),
        ({"subscribe": "orders,,prices"}, "subscribe"),
        ({"subscribe": ""}, "empty"),
    ],
)
def test_invalid_options_are_refused_with_the_reason(given, why):
    assert why in refusal(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"maxTriggerDelay": "15m"}, "maxTriggerDelay needs minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "0"}, "1 or more"),
        ({"minOffsetsPerTrigger": "11", "maxOffsetsPerTrigger": "10"}, "is more than maxOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "10", "maxTriggerDelay": "soon"}, "a length of time, such as 30s, 15m or 500ms"),
        ({"minOffsetsPerTrigger": "10", "maxTriggerDelay": "-1s"}, "a length of time"),
        ({"minOffsetsPerTrigger": "10", "maxTriggerDelay": "3 weeks"}, "a length of time"),
    ],
)
def test_invalid_options_of_a_stream_are_refused_with_the_reason(given, why):
    assert why in refusal(True, **given)


def test_the_longest_delay_is_15_minutes_or_a_length_with_a_unit():
    for given, length_ms in (({}, 900_000), ({"maxTriggerDelay": "250"}, 250), ({"maxTriggerDelay": "2 H"}, 7_200_000)):
        options = parse(True, minOffsetsPerTrigger="10", **given)
        assert (options.min_offsets, options.max_delay_ms) == (10, length_ms)


def test_offsets_of_topics_that_the_pattern_does_not_match_are_refused():
    given = {**NEEDED, "subscribepattern": "o.*", "startingoffsets": '{"ordrs": "earliest", "prices": "earliest"}'}
    del given["subscribe"]
    with pytest.raises(BadOption, match="names the topic prices, which subscribePattern does not match"):
        ReadOptions.parse(given, streaming=False)


@pytest.mark.parametrize(("given", "is_there"), [("1", True), (" TRUE", True), ("0", False)])
def test_the_schema_has_the_pointer_if_the_option_asks_for_it(given, is_there):
    names = DefaultSource({**NEEDED, "includetransaction": given}).schema().names
    assert ("transaction_write_pointer" in names) == is_there


def test_a_bad_pattern_is_refused():
    given = {**NEEDED, "subscribePattern": "("}
    del given["subscribe"]
    with pytest.raises(BadOption, match="subscribePattern"):
        ReadOptions.parse(given, streaming=False)


def test_times_are_milliseconds_or_iso_8601_in_utc():
    for text in ("1700000000000", "2023-11-14T22:13:20Z", "2023-11-14 22:13:20", "2023-11-15T00:13:20+02:00"):
        assert parse(startingTimestamp=text).starting.default == 1_700_000_000_000
    # A start within a millisecond is rounded up: ids have milliseconds.
    assert parse(startingTimestamp="2023-11-14T22:13:20.000001Z").starting.default == 1_700_000_000_001


def test_offsets_are_words_ids_json_or_those_of_a_checkpoint():
    assert parse(startingOffsets=ID).starting.default == bytes.fromhex(ID)
    by_topic = parse(startingOffsets=f'{{"orders": "{ID}"}}').starting
    assert by_topic.of("orders") == TopicBound(bytes.fromhex(ID))
    assert by_topic.of("prices") == TopicBound("earliest")
    checkpoint = f'{{"v": 1, "topics": {{"demo:orders": {{"gen": 3, "next": "{ID}"}}}}}}'
    assert parse(startingOffsets=checkpoint).starting.of("orders") == TopicBound(bytes.fromhex(ID), 3)


def test_options_of_spark_itself_are_ignored():
    assert parse(True, checkpointLocation="/tmp/x", path="y").topics == ("orders",)


def test_any_columns_in_any_order_are_accepted_and_nothing_else():
    everything = read_schema(include_transaction=True)
    some = check_schema(StructType([everything["payload"], everything["namespace"]]))
    assert some.names == ["payload", "namespace"]
    for columns, why in (
        ({"payload": StringType()}, "binary, not string"),
        ({"playload": BinaryType()}, "did you mean payload"),
        ({"zzz": BinaryType()}, "the columns are namespace"),
    ):
        with pytest.raises(BadSchema, match=why):
            check_schema(StructType([StructField(name, kind) for name, kind in columns.items()]))
    with pytest.raises(BadSchema, match="occurs twice"):
        check_schema(StructType([everything["payload"], everything["payload"]]))
    with pytest.raises(BadSchema, match="may be null"):
        check_schema(StructType([StructField("routing_key", StringType(), nullable=False)]))
