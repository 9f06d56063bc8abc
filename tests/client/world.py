"""A world in which steps run without waiting: answers come from a script, and time passes only in pauses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from plainsong.core.effects import Answer, Blocking, Failure, Now, Pause, Send, Tell
from plainsong.core.operations import Operations
from plainsong.settings import Settings


def settings(url: str | list[str] = "http://one", **changed: Any) -> Settings:
    given = {
        "namespace": "default",
        "token_file": None,
        "connect_timeout_s": 5.0,
        "request_timeout_s": 30.0,
        "deadline_s": 60.0,
        "retry": True,
        "max_connections": 10,
    }
    return Settings.checked(url, **{**given, **changed})


def operations(url: str | list[str] = "http://one", **changed: Any) -> Operations:
    return Operations(settings(url, **changed), lambda: 0.0, lambda: 1_000_000)


def problem(status: int, code: str, outcome: str = "not-applied", **headers: str) -> Answer:
    body = {"code": code, "status": status, "detail": f"told {code}", "hint": "a hint", "outcome": outcome}
    told = {"content-type": "application/problem+json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return Answer(status, told, json.dumps(body).encode())


def said(value: Any) -> Answer:
    return Answer(200, {"content-type": "application/json"}, json.dumps(value).encode())


NOBODY = Failure("connect", "refused")
LOST = Failure("lost", "reset")
SILENT = Failure("timeout", "no answer within 30 s")


class World:
    """Runs steps; ``answers`` are given in turn, or by a function of what was sent.

    ``took_s`` is a request's time, ``overslept_s`` what each pause takes longer than was asked for.
    """

    def __init__(
        self,
        answers: Iterable[Answer | Failure] | Callable[[Send], Answer | Failure],
        took_s: float = 0,
        overslept_s: float = 0,
    ) -> None:
        self.now_s = 0.0
        self.sent: list[Send] = []
        self.pauses: list[float] = []
        self._took_s = took_s
        self._overslept_s = overslept_s
        script = answers if callable(answers) else iter(answers)
        self._answer = script if callable(script) else lambda _: next(script)

    def run(self, steps: Any) -> Any:
        try:
            effect = steps.send(None)
            while True:
                try:
                    result = self._done(effect)
                except Exception as error:  # noqa: BLE001 - as the shells do
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as done:
            return done.value

    def _done(self, effect: Any) -> Any:
        match effect:
            case Send():
                self.sent.append(effect)
                self.now_s += self._took_s
                return self._answer(effect)
            case Now():
                return self.now_s
            case Pause():
                self.pauses.append(effect.seconds)
                self.now_s += effect.seconds + self._overslept_s
                return None
            case Blocking() | Tell():
                return effect.work()
        raise AssertionError(effect)
