"""The end of a test run that has explored schedules."""

from __future__ import annotations

import warnings

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Ignore the complaints of event loops that failed schedules have abandoned, and that are collected only now.

    The marks of ``test_schedules`` ignore those that are collected while it runs.
    """
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
