"""The platform that the generator's messages speak of: users, datasets in layers, and programs between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

NAMESPACE: Final = "default"
LAYERS: Final = ("raw", "clean", "joined", "features", "reports")
SUBJECTS: Final = (
    "purchases", "clicks", "sessions", "customers", "products", "stock", "prices", "returns", "payments", "shipments",
    "reviews", "searches", "campaigns", "visits", "suppliers", "invoices",
)  # fmt: skip
VERBS: Final = ("load", "clean", "join", "train", "summarise", "enrich", "export", "backfill")
PEOPLE: Final = (
    "ada", "alan", "barbara", "claude", "donald", "edsger", "frances", "grace", "hedy", "joan", "katherine", "lynn",
    "margaret", "niklaus", "radia", "tony",
)  # fmt: skip
PROGRAMS: Final = 120
#: One program in so many writes back into an earlier layer: lineage has cycles.
BACKWARDS_ONE_IN: Final = 15


@dataclass(frozen=True)
class Program:
    """What it reads and writes each time it runs, and who owns it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    owner: str


@dataclass(frozen=True)
class World:
    """All there is; what comes first in a list is used most."""

    namespace: str
    users: tuple[str, ...]
    datasets: tuple[str, ...]
    programs: tuple[Program, ...]
    _user_weights: tuple[float, ...]
    _dataset_weights: tuple[float, ...]
    _program_weights: tuple[float, ...]

    def some_user(self, rng: random.Random) -> str:
        """A user, the first ones more often."""
        return rng.choices(self.users, cum_weights=self._user_weights)[0]

    def some_dataset(self, rng: random.Random) -> str:
        """A dataset, the first ones more often."""
        return rng.choices(self.datasets, cum_weights=self._dataset_weights)[0]

    def some_program(self, rng: random.Random) -> Program:
        """A program, the first ones more often."""
        return rng.choices(self.programs, cum_weights=self._program_weights)[0]


def make_world(rng: random.Random) -> World:
    """A platform, made by the seed of `rng`."""
    datasets = [f"{layer}.{subject}" for layer in LAYERS for subject in SUBJECTS]
    programs = tuple(_program(rng, number) for number in range(PROGRAMS))
    rng.shuffle(datasets)
    users = (*PEOPLE, *(f"service-{verb}" for verb in VERBS))
    return World(
        NAMESPACE, users, tuple(datasets), programs, _weights(len(users)), _weights(len(datasets)), _weights(PROGRAMS)
    )


def _program(rng: random.Random, number: int) -> Program:
    """One that takes from a layer and the one below, and writes to the next layer."""
    to = rng.randrange(1, len(LAYERS))
    inputs = {f"{LAYERS[rng.choice((to - 1, max(0, to - 2)))]}.{_subject(rng)}" for _ in range(rng.randint(1, 4))}
    outputs = {f"{LAYERS[to]}.{_subject(rng)}" for _ in range(rng.choice((1, 1, 2)))}
    if number % BACKWARDS_ONE_IN == 0:
        outputs.add(f"{LAYERS[to - 1]}.{_subject(rng)}")
    verb = VERBS[number % len(VERBS)]
    owner = f"service-{verb}" if rng.random() < 0.7 else rng.choice(PEOPLE)
    return Program(f"{verb}-{_subject(rng)}-{number}", tuple(sorted(inputs)), tuple(sorted(outputs)), owner)


def _subject(rng: random.Random) -> str:
    return rng.choices(SUBJECTS, cum_weights=_weights(len(SUBJECTS)))[0]


def _weights(count: int) -> tuple[float, ...]:
    """Cumulated weights 1, 1/2, 1/3, …: the usual skew."""
    return tuple(accumulate(1 / rank for rank in range(1, count + 1)))
