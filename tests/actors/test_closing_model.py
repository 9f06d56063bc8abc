"""Every order in which owners, questions, grants, writes and ends can meet: no row becomes durable after the end.

Each ingredient is needed: without it, exploration finds an order that violates the promise.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.actors.closing_model import WRONG, Model, Rules

INGREDIENTS = [field.name for field in fields(Rules)]


@pytest.mark.parametrize(
    "bounds",
    [{"topics": 1, "claims": 3}, {"topics": 2, "claims": 3}],
    ids=["one topic", "two topics"],
)
def test_no_order_of_events_puts_a_row_after_the_end(bounds):
    states, wrong = Model(Rules(), **bounds).explore()
    assert wrong is None
    assert states > 5_000


@pytest.mark.parametrize("left_out", INGREDIENTS)
def test_without_any_one_ingredient_some_order_of_events_goes_wrong(left_out):
    assert Model(Rules(**{left_out: False})).explore()[1] == WRONG
