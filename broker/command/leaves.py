"""The errors in a group of groups: nurseries wrap what falls in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def leaves(error: BaseException) -> Iterator[BaseException]:
    """``error`` itself, or all that are in it, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error
