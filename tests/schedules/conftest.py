"""The end of a test run that has explored schedules."""

from __future__ import annotations

import warnings

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Ignore the warnings of event loops that failed schedules have abandoned, if they are collected only now.

    The marks in ``test_schedules`` ignore those that are collected earlier.
    """
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
