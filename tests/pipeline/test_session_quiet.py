"""The libraries' logs of an interruption are suppressed, since the job reports it; other logs are not."""

from __future__ import annotations

import logging

import pytest

from pyspark_plainsong.pipeline.session import _is_no_interrupt, _quiet


@pytest.fixture
def heard():
    """Texts that reach the root logger's handlers."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    root, py4j = logging.getLogger(), logging.getLogger("py4j")
    level = py4j.level
    root.addHandler(handler)
    yield texts
    root.removeHandler(handler)
    root.removeFilter(_is_no_interrupt)
    py4j.setLevel(level)


def test_a_signal_during_a_call_to_the_jvm_shows_no_traceback_and_other_errors_are_raised(heard):
    _quiet()
    for error in (KeyboardInterrupt(), ValueError()):
        try:
            raise error
        except (KeyboardInterrupt, ValueError):
            logging.getLogger().exception("%s while sending command.", type(error).__name__)
            logging.getLogger("py4j.clientserver").exception("while shutting down connection")
    assert heard == ["ValueError while sending command."]
