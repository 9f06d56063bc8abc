"""Errors as answers: problems, and the explanation of a code."""

from typing import Annotated, Literal, TypeAlias, TypedDict

from plainsong.protocol.answers.fields import Json, component
from plainsong.protocol.errors import BY_CODE

Outcome: TypeAlias = Literal["not-applied", "applied", "unknown"]
Code: TypeAlias = Annotated[str, Json(enum=sorted(BY_CODE))]


@component("Problem", "what went wrong, and whether the request happened", is_open=True)
class ProblemFields(TypedDict):
    """The body of an error."""

    type: str
    title: str
    status: int
    detail: str
    code: Annotated[Code, Json("stable, for programs")]
    hint: str
    outcome: Outcome


@component("ErrorType")
class ErrorType(TypedDict):
    """The explanation of an error code."""

    type: str
    code: Code
    title: str
    status: int
    outcome: Outcome
    whatToDo: str
