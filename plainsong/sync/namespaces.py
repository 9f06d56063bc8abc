"""Namespaces: which there are, and what they say for the topics in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.core import producer_calls

if TYPE_CHECKING:
    from plainsong.core.operations import Operations
    from plainsong.sync.shell import Shell


class Namespaces:
    """Made by ``Client.namespaces``."""

    def __init__(self, operations: Operations, shell: Shell) -> None:
        self._operations = operations
        self._shell = shell

    def list(self) -> list[str]:
        """The names of those with topics or properties, sorted."""
        return self._shell.run(self._operations.call(producer_calls.list_namespaces()))

    def show(self, namespace: str | None = None) -> dict[str, Any]:
        """Its ``properties``, and what they come to; None: the client's own. Raises InvalidName."""
        return self._shell.run(self._operations.call(producer_calls.show_namespace(self._named(namespace))))

    def set(self, namespace: str | None = None, /, **properties: Any) -> dict[str, Any]:
        """Replace all its properties (``deduplication``), in force at once. Raises InvalidProperty, InvalidName."""
        call = producer_calls.set_namespace(self._named(namespace), properties)
        return self._shell.run(self._operations.call(call))

    def _named(self, namespace: str | None) -> str:
        return self._operations.namespace if namespace is None else namespace
