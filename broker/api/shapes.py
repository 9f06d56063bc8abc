"""JSON schemas of the types of answers, for openapi.json."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

from broker.api.schemas import Schema, array, nullable, ref
from plainsong.protocol.answers.fields import COMPONENTS, Component, Json

_SCALARS: dict[object, str] = {int: "integer", str: "string", bool: "boolean", float: "number", NoneType: "null"}


class Shapes:
    """Makes schemas. Named schemas are collected in ``components``, and referenced where they are used."""

    def __init__(self, components: dict[str, Schema]) -> None:
        """Args:
        components: schemas by name, those of requests.
        """
        self.components = dict(components)

    def schema(self, shape: Any) -> Schema:
        """Return the schema of a type. Raises TypeError: answers have no such types, or its name has another schema."""
        if shape in _SCALARS:
            return {"type": _SCALARS[shape]}
        if is_typeddict(shape):
            shown = COMPONENTS.get(shape, Component())
            return self._named(self._record(shape, shown), shown)
        origin, parameters = get_origin(shape), get_args(shape)
        if origin is Annotated:
            return self._annotated(shape)
        if origin is Literal:
            return {"enum": list(parameters)}
        if origin is list:
            return array(self.schema(parameters[0]))
        if origin is dict:
            values = {} if parameters[1] is Any else {"additionalProperties": self.schema(parameters[1])}
            return {"type": "object", **values}
        if origin in (NotRequired, Required):
            return self.schema(parameters[0])
        if origin in (Union, UnionType):
            return self._union(parameters)
        raise TypeError(f"no schema for {shape!r}")

    def _union(self, parameters: tuple[Any, ...]) -> Schema:
        proper = [each for each in parameters if each is not NoneType]
        if len(proper) == 1:
            return nullable(self.schema(proper[0]))
        if all(each in _SCALARS for each in parameters):
            return {"type": [_SCALARS[each] for each in parameters]}
        return {"anyOf": [self.schema(each) for each in parameters]}

    def _annotated(self, shape: Any) -> Schema:
        schema = self.schema(shape.__origin__)
        for mark in shape.__metadata__:
            if isinstance(mark, Component):
                schema = self._named(schema, mark)
            elif isinstance(mark, Json):
                if "enum" in mark.keywords or "const" in mark.keywords:
                    schema = {}  # the values imply the type
                schema = {**schema, **mark.keywords}
        return schema

    def _named(self, schema: Schema, shown: Component) -> Schema:
        if shown.description:
            schema = {**schema, "description": shown.description}
        if not shown.name:
            return schema
        if not shown.of_requests and self.components.setdefault(shown.name, schema) != schema:
            raise TypeError(f"the schema {shown.name} is declared twice")
        return ref(shown.name)

    def _record(self, shape: Any, shown: Component) -> Schema:
        hints = shape.__annotations__  # no strings: the modules of answers do not postpone them
        made: Schema = {"type": "object", "properties": {name: self.schema(field) for name, field in hints.items()}}
        if required := [name for name in hints if name in shape.__required_keys__]:
            made["required"] = required
        return made if shown.is_open else {**made, "additionalProperties": False}
