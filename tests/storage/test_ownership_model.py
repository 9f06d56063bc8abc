"""Every possible order of owners, puts, deaths and retries: nothing is lost, duplicated, reordered or taken back.

Each part of the protocol is needed: without it, exploration finds an order that violates a promise.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.storage.ownership_model import Model
from tests.storage.ownership_state import Rules

LOST, TWICE = "an acknowledged message is lost", "a message is present twice"
ORDER = "messages are out of order"


@pytest.mark.parametrize("stores", [False, True], ids=["publish", "store"])
def test_three_owners_keep_every_promise_in_every_order_of_events(stores):
    states, wrong = Model(Rules(), stores=stores, owners=3).explore()
    assert wrong is None
    assert states > 40_000


@pytest.mark.parametrize(
    ("left_out", "stores", "wrong"),
    [
        ("put_if_absent", False, LOST),
        ("only_void_replaced", False, LOST),
        ("verified", False, LOST),
        ("compared", False, LOST),
        ("filtered", False, TWICE),
        ("payloads_filtered", True, TWICE),
        ("two_cells", False, LOST),
        ("two_cells", True, LOST),
        ("fences_kept", False, LOST),
        ("later_respected", True, TWICE),
        ("new_epoch", False, ORDER),
        ("new_epoch", True, LOST),
        ("epoch_above", False, LOST),
        ("epoch_above", True, LOST),
        ("kind_said", True, TWICE),
    ],
)
def test_without_any_one_ingredient_some_order_of_events_goes_wrong(left_out, stores, wrong):
    reads = left_out == "later_respected"  # by an owner that looks for metadata
    model = Model(Rules(**{left_out: False}), stores=stores, owners=3, said=reads)
    assert model.explore(deep=reads or (stores and left_out == "epoch_above"))[1] == wrong


@pytest.mark.parametrize("stores", [False, True], ids=["publish", "store"])
@pytest.mark.parametrize("left_out", [None, *(field.name for field in fields(Rules))])
def test_a_dead_owner_is_one_that_takes_no_more_steps(left_out, stores):
    rules = Rules() if left_out is None else Rules(**{left_out: False})
    silent, dead = (Model(rules, stores=stores, owners=2, deaths=deaths).explore() for deaths in (False, True))
    assert silent[1] == dead[1]
    assert silent[0] < dead[0]


def test_each_ingredient_has_been_left_out_once():
    marks = test_without_any_one_ingredient_some_order_of_events_goes_wrong.pytestmark
    assert {case[0] for case in marks[0].args[1]} == {field.name for field in fields(Rules)}
