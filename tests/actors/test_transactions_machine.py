"""Random transactions over instances with contradictory views: readers see all of a transaction, or nothing.

Every later reader, at every instance, sees the messages that were acknowledged before a commit, in all topics from the
same moment on; no reader ever sees aborted, open or late messages.
"""

from __future__ import annotations

from collections import defaultdict

import trio
import trio.testing
from actors_in_process import NAME
from hypothesis import given, settings
from hypothesis import strategies as st
from transactions_of_instances import OTHER, cluster_of

from plainsong.protocol.errors import NoOwner, PlainsongError
from storage.base import SERVICE_NAME

TOPICS = (NAME, OTHER)
INSTANCES = ("a", "b", "c")
WHO = st.sampled_from(INSTANCES)
STEPS = st.one_of(
    st.tuples(st.just("begin"), WHO),
    st.tuples(st.just("publish"), WHO, st.integers(0, 2), st.sampled_from(TOPICS), st.booleans()),
    st.tuples(st.just("publish"), WHO, st.integers(0, 2), st.sampled_from(TOPICS), st.booleans()),
    st.tuples(st.just("end"), WHO, st.integers(0, 2), st.sampled_from(("commit", "commit", "abort")), st.booleans()),
    st.tuples(st.just("move"), WHO, st.sampled_from((*TOPICS, SERVICE_NAME)), st.sets(WHO, min_size=1)),
    st.tuples(st.just("hold"), WHO, st.booleans()),
    st.tuples(st.just("read"), WHO),
)


class Course:
    """One run, and the messages that readers may see."""

    def __init__(self, cluster, nursery):
        self.cluster = cluster
        self.nursery = nursery
        self.begun = []
        self.acknowledged = defaultdict(set)
        self.sent = 0
        self.fate = {}
        #: The first observed outcome of a transaction, which never changes.
        self.seen = {}

    async def take(self, step):
        what, *more = step
        await getattr(self, what)(*more)

    async def service(self, who):
        """Return the service of the owner in an instance's view."""
        owner = self.cluster.views[who].owner(SERVICE_NAME).name
        return self.cluster[owner].transactions.home

    async def begin(self, who):
        service = await self.service(who)
        if service is None:
            return
        try:
            self.begun.append((await service.begin()).transaction.transaction_id)
        except PlainsongError:
            return
        self.fate[self.begun[-1]] = "open"

    async def publish(self, who, which, name, waits):
        if not self.begun:
            return
        pointer = self.begun[-1 - which % len(self.begun)]
        self.sent += 1
        payload = f"{pointer}.{self.sent}"
        owner = self.cluster.views[who].owner(name).name

        async def publish():
            over = self.fate[pointer] in ("committed", "aborted")
            try:
                await self.cluster[owner].publish_under(pointer, payload, name=name)
            except PlainsongError:
                return
            assert not over, "something was written behind an end"
            self.acknowledged[pointer].add((name, payload))

        await self._do(publish, waits)

    async def end(self, who, which, how, waits):
        if not self.begun:
            return
        pointer = self.begun[-1 - which % len(self.begun)]
        service = await self.service(who)
        if service is None:
            return

        async def end():
            before = self.fate[pointer]
            if before == "open":
                self.fate[pointer] = "ending"
            try:
                decision = await getattr(service, how)(pointer)
            except PlainsongError:
                return
            assert before not in ("committed", "aborted") or decision.state == before, "an end was taken back"
            self.fate[pointer] = decision.state

        await self._do(end, waits)

    async def _do(self, work, waits):
        if not waits:
            self.nursery.start_soon(work)
            return
        with trio.move_on_after(8):
            await work()

    async def move(self, to, name, seen_by):
        self.cluster.say(to, name, to=sorted(seen_by))
        await trio.testing.wait_all_tasks_blocked()

    async def hold(self, who, lasts):
        held = self.cluster.lines.held.pop(who, None)
        if held is not None:
            held.set()
        if lasts:
            self.cluster.lines.held[who] = trio.Event()

    async def read(self, who):
        certain = {pointer: (fate, set(self.acknowledged[pointer])) for pointer, fate in self.fate.items()}
        with trio.move_on_after(8) as patience:
            try:
                found = await self.cluster[who].read_committed(*TOPICS)
            except PlainsongError:
                return
        if not patience.cancelled_caught:
            self.judge(found, certain)

    def judge(self, found, certain):
        """Check a read. ``certain``: transactions decided before it. Readers see nothing after an undecided message."""
        seen = defaultdict(set)
        for name, (payloads, _) in zip(TOPICS, found, strict=True):
            for payload in payloads:
                seen[int(payload.split(".")[0])].add((name, payload))
        whole = {name for name, (_, held) in zip(TOPICS, found, strict=True) if not held}
        for pointer, (fate, acknowledged) in certain.items():
            mine = seen[pointer]
            if fate == "committed":
                acknowledged = {each for each in acknowledged if each[0] in whole}
                assert acknowledged <= mine, "an acknowledged message of a committed transaction is not seen"
            if self.fate[pointer] in ("open", "aborted", "invalid"):
                assert not mine, f"a transaction is seen that is {self.fate[pointer]}"
            if mine or fate == "committed":
                for name in whole:
                    there = {each for each in mine if each[0] == name}
                    before = self.seen.setdefault((pointer, name), there)
                    assert before == there, "a transaction is not what it was when it was seen"


async def run(steps):
    with trio.fail_after(10_000):
        async with cluster_of(*INSTANCES, commit_deadline_s=3.0, timeout_ms=1 << 30) as cluster:
            async with trio.open_nursery() as nursery:
                course = Course(cluster, nursery)
                await course.begin("a")
                for step in steps:
                    await course.take(step)
                for who in INSTANCES:
                    await course.hold(who, lasts=False)
            # Once all views agree, every transaction can be ended, and every instance shows the same messages.
            for name, owner in zip((*TOPICS, SERVICE_NAME), "bca", strict=True):
                cluster.say(owner, name)
            await trio.sleep(20)
            for pointer in course.begun:
                if course.fate[pointer] in ("open", "ending"):
                    await course.end("a", len(course.begun) - 1 - course.begun.index(pointer), "commit", True)
            for who in INSTANCES:
                certain = {pointer: (fate, course.acknowledged[pointer]) for pointer, fate in course.fate.items()}
                course.judge(await read_at_last(cluster[who]), certain)


async def read_at_last(instance):
    """Read like a client: an owner that only now detects that it was replaced fails once, and the read is repeated."""
    for _ in range(5):
        try:
            return await instance.read_committed(*TOPICS)
        except NoOwner:
            await trio.sleep(20)  # longer than an instance waits before it tries to take a topic back
    return await instance.read_committed(*TOPICS)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_a_transaction_is_seen_whole_or_not_at_all_whatever_the_owners(steps):
    trio.run(run, steps, clock=trio.testing.MockClock(autojump_threshold=0))
