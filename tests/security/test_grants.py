"""The grants file: its syntax, the positions of its errors, and the effect of its grants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.security.grants import MAX_LINES, BadGrantsFile, Pattern, parse_grants, parse_pattern
from broker.security.identity import VERBS
from broker.security.rights import ALL_BITS, BIT, EVERYTHING, MAX_REMEMBERED, NOTHING, Rights, bits_of

FILE = """format = 1
[groups]
payments = ["billing", "cert:ledger.internal"]
[[grant]]
to = ["group:payments", "oidc-group:payments"]   # "somebody"
verbs = ["publish", "poll", "inspect"]
on = ["shop:orders", "shop:audit-*"]
[[grant]]
to = ["operator"]
verbs = ["all"]
on = ["*:*", "system:*", "service"]
[[grant]]
to = ["*"]
verbs = ["inspect"]
on = ["public:*"]
[[quota]]
to = ["group:payments"]
publish_requests_per_s = 500
publish_bytes_per_s = "10 MiB"
"""


def table(text=FILE):
    return parse_grants(text.encode())


def rights(name, *claimed, text=FILE):
    return Rights(table(text).granted(name, claimed))


def test_a_name_has_what_its_groups_have_and_no_more():
    for one in (rights("billing"), rights("cert:ledger.internal"), rights("oidc:x", "payments")):
        assert one.topic_bits("shop", "orders") == bits_of(("publish", "poll", "inspect"))
        assert one.topic_bits("shop", "audit-1") == one.topic_bits("shop", "orders")
        assert one.topic_bits("shop", "orders2") == 0
        assert one.topic_bits("public", "x") == BIT["inspect"]
        assert not one.service_bits
    assert rights("oidc:x").topic_bits("shop", "orders") == 0
    assert rights("payments").topic_bits("shop", "orders") == 0
    assert rights("group:payments").topic_bits("shop", "orders") == 0


def test_all_is_every_verb_and_wildcards_do_not_reach_the_namespace_system():
    operator = rights("operator")
    assert operator.topic_bits("shop", "x") == operator.topic_bits("system", "audit") == ALL_BITS
    assert operator.service_bits == ALL_BITS
    without = rights("operator", text=FILE.replace('"system:*", ', ""))
    assert without.topic_bits("shop", "x") == ALL_BITS
    assert without.topic_bits("system", "audit") == 0
    assert not without.within("system")
    assert rights("operator", text=FILE.replace('"system:*"', '"sys*:*"')).topic_bits("system", "audit") == 0
    assert rights("operator", text=FILE.replace('"system:*"', '"sys*:*"')).topic_bits("system2", "audit") == ALL_BITS


def test_a_route_of_a_namespace_needs_all_of_its_topics():
    billing, operator = rights("billing"), rights("operator")
    assert not any(billing.on_namespace(verb, "shop") for verb in VERBS)
    assert all(operator.on_namespace(verb, "shop") for verb in VERBS)
    assert billing.within("shop")
    assert not billing.within("bank")
    assert NOTHING.namespace_bits("shop") == 0


def test_while_authentication_is_off_everything_is_allowed():
    assert EVERYTHING.topic_bits("system", "audit") == EVERYTHING.namespace_bits("system") == ALL_BITS
    assert EVERYTHING.service_bits == ALL_BITS
    assert EVERYTHING.within("x")


def test_cached_rights_on_topics_are_bounded_over_all_names_together():
    shared = {}
    names = [Rights(table().granted(name, ()), shared) for name in ("operator", "stranger")]
    for number in range(MAX_REMEMBERED // 2 + 10):
        assert [each.topic_bits("shop", f"t{number}") for each in names] == [ALL_BITS, 0]
    assert 0 < len(shared) <= MAX_REMEMBERED


def test_invalid_topic_names_are_not_cached():
    cached = {}
    one = Rights(table().granted("operator", ()), cached)
    for place in (("shop", "t" * 256), ("n" * 256, "t")):
        one.topic_bits(*place)
    assert not cached
    one.topic_bits("n" * 255, "t" * 255)
    assert len(cached) == 1


def test_the_line_of_a_grant_is_that_of_its_header():
    assert [grant.line for grant in table().grants] == [4, 8, 12]
    assert [quota.line for quota in table().quotas] == [16]


def test_quotas_have_sizes_with_units():
    (quota,) = table().quotas
    assert quota.limits == {"publish_requests_per_s": 500.0, "publish_bytes_per_s": 10.0 * 1024 * 1024}


@pytest.mark.parametrize(
    ("was", "becomes", "line", "column", "says"),
    [
        ('"poll", "i', '"pol", "i', 6, 21, "did you mean 'poll'"),
        ('"shop:orders"', '"sh*p:orders"', 7, 7, "sh*p:orders"),
        ('"shop:orders"', '"orders"', 7, 7, "orders"),
        ('to = ["operator"]', "to = []", 9, 1, "non-empty"),
        ('to = ["operator"]', 'to = "operator"', 9, 1, "list"),
        ('to = ["operator"]', 'to = ["a b"]', 9, 7, "is not a name"),
        ('to = ["operator"]', 'to = ["anonymous"]', 9, 7, "reserved"),
        ('on = ["*:*"', 'onn = ["*:*"', 11, 1, "did you mean 'on'"),
        ('"group:payments", "oidc', '"group:payment", "oidc', 5, 7, "did you mean 'payments'"),
        ('"billing"', '"group:billing"', 3, 13, "a group cannot be a member of a group"),
        ("format = 1", "format = 2", 1, 1, "format is not 1"),
        ("format = 1", "format = true", 1, 1, "format is not 1"),
        ("format = 1", "formt = 1", 1, 1, "did you mean 'format'"),
        ("[[quota]]", "[[quotas]]", 16, 1, "did you mean 'quota'"),
        ('"10 MiB"', '"10 MiB/s"', 19, 1, "10 MiB"),
        ('verbs = ["all"]\n', "", 8, 1, "verbs is missing"),
        ("[groups]", "[groups", 2, 8, "Expected"),
        ("500", "-1", 18, 1, "above 0"),
        ("500", "0", 18, 1, "above 0"),
        ('"system:*", ', '"system:*", """\\nnothing""", ', 11, 1, "nothing"),
    ],
)
def test_a_fault_names_its_line_and_column_and_refuses_the_whole_file(was, becomes, line, column, says):
    assert was in FILE
    with pytest.raises(BadGrantsFile) as caught:
        table(FILE.replace(was, becomes, 1))
    assert (caught.value.line, caught.value.column) == (line, column)
    assert says in caught.value.detail


def test_a_file_with_too_many_lines_is_refused():
    parse_grants(b"format = 1\n" + b"#\n" * (MAX_LINES - 1))
    with pytest.raises(BadGrantsFile, match="100000 lines"):
        parse_grants(b"format = 1\n" + b"#\n" * MAX_LINES)


def test_the_error_for_a_file_that_is_not_text_names_the_place():
    with pytest.raises(BadGrantsFile) as caught:
        parse_grants(b"format = 1\n# \xff")
    assert (caught.value.line, caught.value.column) == (2, 3)


@pytest.mark.parametrize("text", ["a:b", "a*:b", "a:b*", "*:*", "system:audit"])
def test_a_pattern_is_shown_unchanged(text):
    assert str(parse_pattern(text)) == text
    assert str(parse_pattern("service")) == "service"


@pytest.mark.parametrize(
    "text", ["", ":", "a", "a:", ":b", "a**:b", "*a:b", "a:*b", "a:b:c", "a-b:c", "A b:c", "Service"]
)
def test_an_invalid_pattern_is_refused(text):
    with pytest.raises(ValueError, match="neither"):
        parse_pattern(text)


NAMES = st.text("ab", min_size=1, max_size=3)
PARTS = NAMES | NAMES.map(lambda name: name[:-1] + "*")


@given(PARTS, PARTS, NAMES, NAMES)
def test_a_pattern_matches_equal_names_or_a_prefix(namespace_part, topic_part, namespace, topic):
    def fits(part, name):
        return name.startswith(part[:-1]) if part.endswith("*") else name == part

    expected = fits(namespace_part, namespace) and fits(topic_part, topic)
    assert Pattern(namespace_part, topic_part).matches(namespace, topic) is expected


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_is_read_or_refused(text):
    try:
        parse_grants(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    except BadGrantsFile:
        return
    raise AssertionError("a file without format = 1 was taken")


PIECES = st.sampled_from(
    [*FILE.splitlines(), '"', "'''", '"""', "[", "]", "=", "#", "{", "}", "format = 1", 'to = ["x"]']
)


@given(st.lists(PIECES, max_size=12).map("\n".join))
def test_pieces_of_files_in_any_order_are_read_or_refused_with_a_place(text):
    try:
        parse_grants(text.encode())
    except BadGrantsFile as error:
        assert error.line >= 1
        assert error.line <= text.count("\n") + 1


def test_a_file_of_too_many_bytes_is_refused_with_their_number(monkeypatch):
    monkeypatch.setattr("broker.security.grants.MAX_FILE_BYTES", 20)
    parse_grants(b"format = 1\n")
    with pytest.raises(BadGrantsFile, match="it is larger than 20 bytes"):
        parse_grants(b"format = 1\n" + b"#" * 10)
