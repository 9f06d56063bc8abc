"""One simulated history: instances, clients and faults from a seed, and the checker's result."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import trio

from plainsong.protocol.ids import SEQUENCES_PER_MS
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.state import PositionSequence, Run
from tests.cluster.course import create_topics, settle
from tests.cluster.history.checker import check
from tests.cluster.history.records import History
from tests.cluster.readers import reader
from tests.cluster.voices import EXPECTED, Stage, Voice
from tests.cluster.writers import plain_writer, producing_writer, transactional_writer
from tests.simulation import brief, garden, jobs, kept, ledger, moments, tephra, workloads
from tests.simulation.clocks import START_MS, SimulatedTime, time_now
from tests.simulation.disk import Disk
from tests.simulation.instances import SimulatedInstance, SimulatedTalk, configured
from tests.simulation.network import Network
from tests.simulation.scheduling import scheduled_by, without_instruments

T = TypeVar("T")
#: Time limit for recovery after the faults.
QUIET_S = 100.0
#: Positions per millisecond in a crowded history, and the function that allocates them. With two, mistakes in requests
#: that spill into the next millisecond are found five times as often as with four.
FEW, TAKE = 2, PositionSequence.take
#: Limit on a history's processor time, about a hundred times its usual time.
STUCK_S = 30.0


@dataclass(slots=True)
class Plan:
    """Parameters of a history; everything else is drawn from the seed."""

    seed: int
    instances: int = 1
    topics: int = 3
    length_s: float = 1.0
    every_s: float = 0.25
    """Mean time from the start of one fault to the start of the next."""
    clients: tuple[str, ...] = ()
    """Names of the clients' workloads."""
    knobs: tuple[tuple[str, float | str], ...] = ()
    """The instances' settings that differ from the usual ones."""
    crowded: bool = False
    """True if each millisecond of a topic has few positions left, as if many messages had been published in it."""
    faults: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """The result of a history."""

    plan: Plan
    history: History
    anomalies: list[tuple[str, str]]
    surprises: list[str]
    story: list[str]
    looks: list[moments.Look] = field(default_factory=list)
    """Reads as of moments."""

    @property
    def is_good(self) -> bool:
        return not self.anomalies and not self.surprises


class SimulatedVoice(Voice):
    """A client with simulated connections."""

    #: A clock that jumps ends transactions early.
    expected = EXPECTED | {"transaction_expired", "topic_not_found", "topic_exists", "partly_cleaned"}

    async def _talk(self, instance: Any) -> Any:
        return SimulatedTalk(instance)

    def _drop(self, name: str) -> None:
        """Do nothing: there is nothing to close."""


class TravellingVoice(SimulatedVoice):
    """A client that requests moments that are in the future by some clock."""

    expected = SimulatedVoice.expected | {"invalid_parameter"}


class StagingVoice(SimulatedVoice):
    """A client whose staged messages are removed when a clock jumps far enough."""

    expected = SimulatedVoice.expected | {"invalid_parameter", "already_published"}


class SimulatedStage(Stage):
    """State shared by the clients of a simulated history."""

    sizes = (1, 1, 1, 2, 3, 12)
    limits = (2, 7, None)
    timeouts_s = (1, 2, 30)
    #: Number of normal rests; after these, clients rest longer, because longer histories find hardly any more mistakes.
    LIVELY = 80
    _rests = 0

    async def rest(self, pause_s: float) -> None:
        self._rests += 1
        await time_now().sleep(pause_s if self._rests < self.LIVELY else 2.0)

    def __init__(self, world: World, topics: list[str], seed: int) -> None:
        super().__init__(world, topics, seed)  # type: ignore[arg-type]  # it has what clients use of a cluster
        self.stores = 0.3 if "staging" in world.plan.clients else 0.0
        self.world = world
        self.brief = brief.Notes()
        self.garden = garden.Model()
        self.ledger = ledger.Notes()
        self.moments = moments.Notes()
        self.tephra = tephra.Notes()
        #: Transactions that clients began but under which they published nothing.
        self.idle: list[int] = []
        self.asleep: list[str] = []
        """Readers that waited and were never woken."""

    def traveller(self, seed: int) -> Voice:
        """Return a client that reads as of moments."""
        return TravellingVoice(self, seed)

    def stager(self, seed: int) -> Voice:
        """Return a client that stages messages."""
        return StagingVoice(self, seed)

    def voice(self, seed: int) -> Voice:
        return SimulatedVoice(self, seed)

    def beside(self, instances: Sequence[SimulatedInstance], history: History, seed: int) -> SimulatedStage:
        """Return a stage of other instances whose clients continue a history."""
        stage = SimulatedStage(self.world, self.topics, seed)
        stage.cluster = SimpleNamespace(instances=instances)  # type: ignore[assignment]
        stage.history = history
        return stage


class World:
    """The instances and their faults."""

    def __init__(self, plan: Plan, nursery: trio.Nursery, story: list[str]) -> None:
        self.plan, self.nursery = plan, nursery
        self.rng = Random(plan.seed)
        self.network = Network(self._random())
        names = "abcdef"[: plan.instances]
        self.disk = Disk(shared=plan.instances > 1)
        self.config = config = configured(
            transactions__max_lifetime_s=60, retention__delete_grace_s=garden.GRACE_S, **dict(plan.knobs)
        )
        self.instances = [SimulatedInstance(name, self.disk, self.network, config, self._random()) for name in names]
        for each in self.instances:
            each.reread = partial(self._tell_soon, each)
        self.story = story
        self.backup: kept.Backup | None = None
        """A backup taken during the history."""
        self.restored: list[tuple[str, str]] = []
        """Violations in the restored backup."""
        self._most_ms, self._lows_ms = START_MS, list[int]()
        self.stage = SimulatedStage(
            self, [f"topic-{number}" for number in range(plan.topics)], self.rng.randrange(1 << 30)
        )

    def _random(self) -> Random:
        return Random(self.rng.randrange(1 << 62))

    # --- possible times ------------------------------------------------------------------------

    def now_s(self) -> float:
        return trio.current_time()

    async def sleep(self, seconds: float) -> None:
        await time_now().sleep(seconds)

    def _read_clocks(self) -> int:
        """Return the time of the slowest wall clock, and record the highest time of any clock so far."""
        now_ms = [each.clock.peek_ms() for each in self.instances]
        self._most_ms = max(self._most_ms, *now_ms)
        return min(now_ms)

    def latest_ms(self) -> int:
        """Return a time that no wall clock has ever passed."""
        self._read_clocks()
        return self._most_ms

    def watch(self) -> tuple[int, int]:
        """Start an interval for ``between``."""
        return self._read_clocks(), len(self._lows_ms)

    def between(self, since: tuple[int, int]) -> tuple[int, int]:
        """Return two times: since then no wall clock was below the first, and none was ever above the second."""
        least_ms, jumps = since
        return min([least_ms, self._read_clocks(), *self._lows_ms[jumps:]]), self._most_ms

    def tell(self, text: str) -> None:
        self.story.append(f"{trio.current_time() - self.begun_s:8.3f} s  {text}")

    @property
    def there(self) -> list[str]:
        return [each.name for each in self.instances if each.state == "up"]

    async def run(self) -> None:
        self.begun_s = trio.current_time()
        for each in self.instances:
            await self.nursery.start(each.run, [one.name for one in self.instances])
        await create_topics(self.stage)
        async with trio.open_nursery() as readers:
            async with trio.open_nursery() as writers:
                self._start(writers, readers)
                await self._disturb()
                await self._heal()
                self.stage.over = True
            readers.cancel_scope.cancel()
        if "wake" in self.plan.clients:
            await workloads.wake(self.stage, self.rng.randrange(1 << 30))
        await settle(self.stage)
        if "moments" in self.plan.clients:
            await moments.return_to(self.stage, self.plan.seed)
        if self.backup is not None:
            self.restored = await kept.judged(self, self.backup, self.plan.seed)
        if "ledger" in self.plan.clients:
            await ledger.verify(self.stage, self.plan.seed)

    def _start(self, writers: trio.Nursery, readers: trio.Nursery) -> None:
        for number, client in enumerate(self.plan.clients):
            for work in self._work_of(client, number):
                writers.start_soon(work, self.rng.randrange(1 << 30), self.rng.choice(self._pauses_s()))
        if "backup" in self.plan.clients:
            writers.start_soon(kept.take, self, self._random())
        for committed in (True, False):
            waits = self.rng.random() < 0.5
            work = partial(reader, committed=committed, waits=waits, pause_s=self.rng.choice((0.1, 0.5)))
            readers.start_soon(work, self.stage, self.rng.randrange(1 << 30))
        if "moments" in self.plan.clients:
            # Separate seeds, so that histories without these readers are unchanged.
            readers.start_soon(moments.travel, self.stage, self.plan.seed, 0.1)
        if "ledger" in self.plan.clients:
            writers.start_soon(ledger.keep, self.stage, self.plan.seed)

    def _work_of(self, client: str, number: int) -> list[Callable[[int, float], Awaitable[None]]]:
        """Return the work of a workload's clients; each takes a seed and the pause between two requests."""
        stage = self.stage
        if client in NAMED:
            return [partial(NAMED[client], stage, f"{client[:2]}{number}")]
        if client == "rivals":
            topic = self.rng.choice(stage.topics)
            return [partial(workloads.rival, stage, f"ri{number}", who, topic) for who in "ab"]
        if client in ("brief", "garden"):
            return [partial(brief.watch if client == "brief" else garden.tend, stage)]
        return []

    def _pauses_s(self) -> Sequence[float]:
        """Return pauses that give a history about the same number of requests, regardless of its length."""
        return (0.05, 0.2, 0.5) if self.plan.length_s < 2 else (0.2, 0.5)

    async def _disturb(self) -> None:
        """Begin one fault after another, while earlier ones last; return when the last one is over."""
        async with trio.open_nursery() as lasting:
            with trio.move_on_after(self.plan.length_s):
                while True:
                    await time_now().sleep(self.rng.expovariate(1 / self.plan.every_s))
                    if self.plan.faults:
                        lasting.start_soon(getattr(self, "_" + self.rng.choice(self.plan.faults)))

    # --- faults --------------------------------------------------------------------------------

    async def _kill(self, *, power: bool = False) -> None:
        self._end_of(self.rng.choice(self.instances), power=power)

    def _end_of(self, victim: SimulatedInstance, *, power: bool) -> None:
        if victim.state == "down":
            return
        self.tell(f"{victim.name} {'loses power' if power else 'is killed'}")
        victim.kill(power=power)
        self.nursery.start_soon(self._again, victim, self.rng.expovariate(4.0))
        self._membership_changes()

    async def _power(self) -> None:
        await self._kill(power=True)

    async def _again(self, victim: SimulatedInstance, after_s: float) -> None:
        await time_now().sleep(after_s)
        if victim.life is None:
            self.tell(f"{victim.name} starts again")
            await self.nursery.start(victim.run, [*self.there, victim.name])
            self._membership_changes()

    def _membership_changes(self) -> None:
        for each in self.instances:
            self._tell_soon(each)

    def _tell_soon(self, instance: SimulatedInstance) -> None:
        self.nursery.start_soon(self._tell_later, instance, self.rng.expovariate(5.0), {})

    async def _tell_later(self, instance: SimulatedInstance, after_s: float, lies: dict[TopicName, str]) -> None:
        await time_now().sleep(after_s)
        life = instance.life
        if life is not None and life.daemon is not None and not instance.alone:
            life.view.tell(self.there, lies)

    async def _lie(self) -> None:
        """Report wrong owners to an instance for a while."""
        lies = {TopicName("ring", topic): self.rng.choice(self.instances).name for topic in self.stage.topics}
        deceived = self.rng.choice(self.instances)
        self.tell(f"{deceived.name} gets wrong owners")
        await self._tell_later(deceived, 0.0, lies)
        self.nursery.start_soon(self._tell_later, deceived, self.rng.expovariate(0.5), {})

    async def _jump(self) -> None:
        instance, by_s = self.rng.choice(self.instances), self.rng.choice((-3600, -5, -0.5, 0.5, 5, 3600))
        self._jump_by(instance, by_s)
        if self.rng.random() < 0.5:
            await time_now().sleep(self._while_s(1.0))
            self._jump_by(instance, -by_s)

    def _jump_by(self, instance: SimulatedInstance, by_s: float) -> None:
        self.tell(f"the clock of {instance.name} jumps by {by_s} s")
        self._read_clocks()
        instance.clock.jump(by_s)
        self._lows_ms.append(self._read_clocks())

    async def _astray(self) -> None:
        """Set a clock wrong until its instance restarts, as if the machine corrected it at its start."""
        instance, by_s = self.rng.choice(self.instances), self.rng.choice((2, 5, 60, -2, -5))
        self._jump_by(instance, by_s)
        await time_now().sleep(self._while_s(3.0))
        self._end_of(instance, power=self.rng.random() < 0.3)
        self._jump_by(instance, -by_s)

    def jump_all(self, by_s: float) -> None:
        """Make all wall clocks jump now."""
        for each in self.instances:
            self._jump_by(each, by_s)

    def end_all(self) -> None:
        """End all processes now, and restart them."""
        for each in self.instances:
            self._end_of(each, power=False)

    async def _drift(self) -> None:
        instance, rate = self.rng.choice(self.instances), self.rng.choice((0.5, 0.9, 1.1, 2.0))
        self.tell(f"the clock of {instance.name} runs at {rate}")
        self._read_clocks()
        instance.clock.drift(rate)

    async def _failing(self) -> None:
        instance = self.rng.choice(self.instances)
        self.tell(f"the disk of {instance.name} fails now and then")
        instance.weather.fails, instance.weather.reads_fail = 0.2, self.rng.choice((0.0, 0.02))
        await time_now().sleep(self._while_s(3.0))
        instance.weather.fails = instance.weather.reads_fail = 0.0
        self.tell(f"the disk of {instance.name} works again")

    async def _slow(self) -> None:
        instance = self.rng.choice(self.instances)
        self.tell(f"the disk of {instance.name} is slow")
        instance.weather.write_s = self.rng.choice((0.05, 0.5))
        await time_now().sleep(self._while_s(3.0))
        instance.weather.write_s = 0.001

    async def _freeze(self) -> None:
        """Freeze a process: nothing leaves it and nothing reaches it."""
        instance = self.rng.choice(self.instances)
        self.tell(f"{instance.name} is frozen")
        others = ["client", *(each.name for each in self.instances if each is not instance)]
        for other in others:
            self.network.hold(instance.name, other)
            self.network.hold(other, instance.name)
        instance.weather.block()
        await time_now().sleep(self._while_s(15.0))
        instance.weather.unblock()
        self.network.heal()
        self.tell(f"{instance.name} continues")

    async def _part(self) -> None:
        """Cut a link between two places, in one direction or both."""
        places = ["client", *(each.name for each in self.instances)]
        one, other = self.rng.sample(places, 2)
        both = self.rng.random() < 0.5
        self.tell(f"nothing gets from {one} to {other}" + " or back" * both)
        self.network.hold(one, other)
        if both:
            self.network.hold(other, one)
        await time_now().sleep(self._while_s(13.0))
        self.network.heal()
        self.tell("the network works again")

    async def _break(self) -> None:
        instance = self.rng.choice(self.instances)
        self.tell(f"the connections of {instance.name} break")
        self.network.break_all(instance.name)

    def _while_s(self, longest_s: float) -> float:
        return self.rng.choice((0.05, 0.2, 0.2, 0.2, 1.0, 1.0, 1.0, longest_s))

    async def _heal(self) -> None:
        """End all faults."""
        self.network.heal()
        for each in self.instances:
            each.weather.clear()
            self._read_clocks()
            each.clock.drift(1.0)
            while each.state == "down":
                if each.life is None:
                    await self.nursery.start(each.run, [one.name for one in self.instances])
                await time_now().sleep(0.1)
        for each in self.instances:
            await self._tell_later(each, 0.0, {})
        self.tell("all faults have ended")


NAMED: dict[str, Callable[..., Awaitable[None]]] = {
    "plain": plain_writer,
    "producer": producing_writer,
    "transactions": transactional_writer,
    "regrouping": workloads.regrouping_producer,
    "entangled": workloads.entangled_writer,
    "hasty": workloads.hasty_writer,
    "idle": workloads.idle_writer,
    "tephra": tephra.client,
    "tephra writer": tephra.writer,
    "jobs": jobs.run,
}
EVERYWHERE = ["kill", "kill", "power", "jump", "drift", "astray", "failing", "failing", "slow", "part"]
AMONG_SEVERAL = [*EVERYWHERE, "lie", "lie", "freeze", "break", "part"]
#: Workloads with their probability in a history; a workload that is listed twice has two clients, each with that
#: probability. Leaving out others makes room: a mistake that needs many requests of one kind is found in histories with
#: little else.
CLIENTS = (
    ("plain", 0.4),
    ("producer", 0.3),
    ("transactions", 0.3),
    ("regrouping", 0.2),
    ("rivals", 0.15),
    ("entangled", 0.25),
    ("entangled", 0.15),
    ("brief", 0.25),
    ("garden", 0.25),
    ("staging", 0.25),
    ("wake", 0.2),
    ("backup", 0.15),
)
#: Settings and their unusual values, which make rare paths frequent.
KNOBS: tuple[tuple[str, float, tuple[float, ...]], ...] = (
    ("retention__interval_s", 0.7, (0.1, 0.5)),
    ("cache__max_bytes", 0.3, (0, 4096)),
    ("topic__checkpoint_rows", 0.3, (1, 10)),
    ("deduplication__snapshot_entries", 0.3, (1, 10)),
)


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed: a random selection of everything a history may contain (swarm testing)."""
    rng = Random(seed)
    instances = rng.choice((1, 1, 1, 1, 2, 3))
    kinds = AMONG_SEVERAL if instances > 1 else EVERYWHERE
    faults = rng.sample(kinds, rng.randrange(1, 5)) if rng.random() < 0.9 else []
    clients = tuple(name for name, likely in CLIENTS if rng.random() < likely)
    length_s = rng.choice((0.3, 0.6, 0.6, 1.2, 4.0))
    plan = Plan(
        seed,
        instances,
        clients=clients,
        knobs=tuple((name, rng.choice(values)) for name, likely, values in KNOBS if rng.random() < likely),
        topics=rng.choice((1, 2, 3)) + 1,
        length_s=length_s,
        every_s=max(rng.choice((0.1, 0.3)), length_s / 8),
        faults=faults,
    )
    # Drawn last, so that seeds without these workloads keep their plans.
    for later in ("moments", "ledger"):
        if rng.random() < 0.25:
            plan = replace(plan, clients=(*plan.clients, later))
    if rng.random() < 0.2:
        plan = replace(plan, clients=(*plan.clients, "jobs"))
    if instances > 1 and rng.random() < 0.2:
        # With a slow disk, the service decides a transaction's requests together, which these clients provoke.
        plan = replace(plan, clients=(*plan.clients, "hasty", "hasty"), faults=[*plan.faults, "slow", "slow"])
    # Not with "brief", whose judge derives message times from wall clocks, since a full millisecond spills into the
    # next one.
    plan = replace(plan, crowded=rng.random() < 0.15 and "brief" not in plan.clients)
    if instances == 1 and rng.random() < 0.15:
        # After a clock went back, the service counts on from its last pointer, which must survive a crash.
        plan = replace(plan, clients=(*plan.clients, "idle"), faults=[*plan.faults, "jump", "kill", "kill"])
    if instances == 1 and rng.random() < 0.15:
        # Served over Thrift, the invalid list is never pruned, as other stores may rely on it.
        knobs = (*plan.knobs, ("transactions__thrift", "127.0.0.1:15165"))
        plan = replace(plan, clients=(*plan.clients, "tephra", "tephra"), knobs=knobs, faults=[*plan.faults, "power"])
        if rng.random() < 0.5:
            plan = replace(plan, clients=(*plan.clients, "tephra writer"))
    return plan


def _take_few(positions: PositionSequence, now_ms: int, count: int) -> list[Run]:
    """Like ``PositionSequence.take``, in a topic whose milliseconds are almost full from the start."""
    if now_ms > positions.last_ts_ms:
        positions.advance_past(now_ms, SEQUENCES_PER_MS - 1 - FEW)
    return TAKE(positions, now_ms, count)


def simulate(plan: Plan) -> Report:
    """Run one history; a plan gives the same history on every machine, given the same hash seed of Python."""
    before = trio.to_thread.run_sync
    if plan.crowded:
        PositionSequence.take = _take_few  # type: ignore[method-assign]
    trio.to_thread.run_sync = _run_here  # type: ignore[assignment]
    story: list[str] = []
    signal.signal(signal.SIGVTALRM, _stuck)
    signal.setitimer(signal.ITIMER_VIRTUAL, STUCK_S)
    try:
        with scheduled_by(plan.seed):
            return trio.run(_simulate, plan, story, clock=SimulatedTime())
    except Exception as error:  # noqa: BLE001  # a daemon that breaks the simulation is a bad one
        return Report(plan, History(), [], [f"it ended with {error!r}"], story)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        trio.to_thread.run_sync = before
        PositionSequence.take = TAKE  # type: ignore[method-assign]


async def _run_here(work: Callable[..., T], *arguments: object, **_: object) -> T:
    """Run work in the event loop, since threads would run in real time."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)


def _stuck(*_: object) -> None:
    raise RuntimeError(f"the history used {STUCK_S} s of processor time")


async def _simulate(plan: Plan, story: list[str]) -> Report:
    without_instruments()
    async with trio.open_nursery() as nursery:
        world = World(plan, nursery, story)
        with trio.move_on_after(plan.length_s + QUIET_S) as limit:
            await world.run()
        stage = world.stage
        if limit.cancelled_caught:
            stage.surprises.append(f"unfinished {QUIET_S} s after the last fault: {list(stage.last)[-3:]}")
        anomalies: list[tuple[str, str]] = [] if limit.cancelled_caught else [*check(stage.history)]
        anomalies += brief.judged(stage.brief)
        anomalies += [("garden", text) for text in stage.garden.wrong]
        anomalies += ledger.judged(stage.ledger)
        if not limit.cancelled_caught:
            anomalies += moments.judged(stage.moments, stage.history)
        anomalies += workloads.issued_twice(stage)
        anomalies += tephra.judged(stage.tephra)
        anomalies += world.restored
        anomalies += [("asleep", text) for text in stage.asleep]
        for each in world.instances:
            each.kill()
        nursery.cancel_scope.cancel()
    return Report(plan, stage.history, anomalies, stage.surprises, world.story, stage.moments.looks)


# --- shrinking -------------------------------------------------------------------------------------


def shrunk(plan: Plan, tries: int = 60) -> Report:
    """Shrink a bad history's plan: return the shortest bad history found by leaving parts out."""
    best = simulate(plan)
    if best.is_good:
        return best
    goes_on = True
    while goes_on and tries > 0:
        goes_on = False
        for smaller in _smaller(best.plan):
            tries -= 1
            found = simulate(smaller)
            if not found.is_good:
                best, goes_on = found, True
                break
            if tries <= 0:
                break
    return best


def _smaller(plan: Plan) -> Iterator[Plan]:
    for at in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:at] + plan.faults[at + 1 :])
    for at in range(len(plan.clients)):
        yield replace(plan, clients=plan.clients[:at] + plan.clients[at + 1 :])
    for at in range(len(plan.knobs)):
        yield replace(plan, knobs=plan.knobs[:at] + plan.knobs[at + 1 :])
    if plan.length_s > 0.2:
        yield replace(plan, length_s=plan.length_s / 2)
        yield replace(plan, length_s=plan.length_s * 0.8)
    if plan.topics > 2:
        yield replace(plan, topics=plan.topics - 1)
    if plan.instances > 1:
        yield replace(plan, instances=plan.instances - 1)
