"""Namespaces: which there are, and what they say for the topics in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.core import producer_calls

if TYPE_CHECKING:
    from plainsong.aio.shell import AsyncShell
    from plainsong.core.operations import Operations


class AsyncNamespaces:
    """Made by ``AsyncClient.namespaces``."""

    def __init__(self, operations: Operations, shell: AsyncShell) -> None:
        self._operations = operations
        self._shell = shell

    async def list(self) -> list[str]:
        """The names of those with topics or properties, sorted."""
        return await self._shell.run(self._operations.call(producer_calls.list_namespaces()))

    async def show(self, namespace: str | None = None) -> dict[str, Any]:
        """Its ``properties``, and what they come to; None: the client's own. Raises InvalidName."""
        return await self._shell.run(self._operations.call(producer_calls.show_namespace(self._named(namespace))))

    async def set(self, namespace: str | None = None, /, **properties: Any) -> dict[str, Any]:
        """Replace all its properties (``deduplication``), in force at once. Raises InvalidProperty, InvalidName."""
        call = producer_calls.set_namespace(self._named(namespace), properties)
        return await self._shell.run(self._operations.call(call))

    def _named(self, namespace: str | None) -> str:
        return self._operations.namespace if namespace is None else namespace
