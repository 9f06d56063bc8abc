"""The words of links: asks and answers of topics and of the transaction service, and what they are made of.

Whoever adds kinds of calls registers their classes here too, from a module of its own (``VOCABULARY.register``).
"""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from protocol import page, properties, records, requests
from protocol.names import TopicName
from protocol.peering.values import Vocabulary
from protocol.topic import asks, pointer_asks, staging_asks
from protocol.topic.producers import asks as producer_asks
from protocol.topic.producers.policy import Effective, NamespacePolicy
from protocol.topic.producers.record import Result
from protocol.transactions.manager import answers as manager_answers
from protocol.transactions.manager import asks as manager_asks
from protocol.transactions.transaction import Transaction, TransactionType, VisibilityLevel
from protocol.transactions.view import View

if TYPE_CHECKING:
    from types import ModuleType

#: One class of each module whose classes all travel.
_OF_WHOLE_MODULES = (
    asks.Publish,
    pointer_asks.PublishUnder,
    staging_asks.StoreStaged,
    producer_asks.OpenProducer,
    manager_asks.Begin,
    manager_answers.Begun,
    requests.PublishRequest,
    page.Page,
)
_SINGLE = (
    TopicName,
    NamespacePolicy,
    Effective,
    Result,
    Transaction,
    TransactionType,
    VisibilityLevel,
    properties.TopicProperties,
    records.Metadata,
    records.Reader,
    records.NamespaceProperties,
)
_VIEW_PARTS = ("read_pointer", "in_progress", "invalids", "own")


def _plain_classes(module: ModuleType) -> list[type]:
    """The dataclasses and named tuples that a module defines itself."""
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [cls for cls in own if is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))]


def _view_apart(view: View) -> dict[str, Any]:
    return dict(zip(_VIEW_PARTS, view.parts, strict=True))


def _view_together(given: dict[str, Any]) -> View:
    return View(*(given[part] for part in _VIEW_PARTS))


def _range_together(given: dict[str, Any]) -> range:
    return range(given["start"], given["stop"])


def new_vocabulary() -> Vocabulary:
    """A vocabulary of all of these words."""
    words = Vocabulary()
    for cls in _OF_WHOLE_MODULES:
        words.register(*_plain_classes(sys.modules[cls.__module__]))
    words.register(*_SINGLE)
    words.register_as(View, _view_apart, _view_together)
    words.register_as(range, lambda run: {"start": run.start, "stop": run.stop}, _range_together)  # of sequence ids
    return words


#: The one of this process.
VOCABULARY = new_vocabulary()
