"""A simulation of the commit log: primaries, standbys, and an object store that loses and delays answers.

A seed determines the course of events. Directories are killed, copied and started twice, set back to an earlier state,
and started by clones with the run of another process; running processes are cloned; logs get gaps; standbys follow, and
take over at any moment, since no clock protects them. ``World.run`` returns the first violation, None if there is none:

* a standby has taken over, and its directory differs from the log,
* a commit that a process believed to count is missing in the log, or has other contents there,
* two processes begin one epoch,
* the log cannot be read from its root, or has no base,
* a commit that was acknowledged or shown in the mode ``SYNC`` is missing there, or there was no base,
* a commit was acknowledged in the mode ``ASYNC`` before the log said that this mode is in force,
* a process ends as deposed though nothing has ended its epoch,
* after all faults, a start on the last winner's directory fails, or a commit of that directory does not reach the log.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import ModuleType
from typing import Any

from plainsong.protocol.effects import Table
from storage.replication import answers as right_answers
from storage.replication.notices import LEASE, decode_seal, log_name
from storage.replication.segment import (
    ASYNC,
    NOTHING_BEFORE,
    SYNC,
    Change,
    Commit,
    DamagedLog,
    decode_segment,
    digest,
    is_segment,
)

UPLOADS = 3
STEPS = 500
#: The chance of each step that a running process is cloned.
CLONES = 0.005


@dataclass
class Directory:
    """Durable commits, by number; and the last epoch that its process began."""

    commits: dict[int, bytes] = field(default_factory=dict)
    epoch: int = 0

    @property
    def last(self) -> int:
        return max(self.commits, default=0)

    def copy(self) -> Directory:
        return Directory(dict(self.commits), self.epoch)


class Diverged(Exception):
    """The log and the directory have other contents under one number, or the log begins after the directory."""


@dataclass(eq=False)
class Process:
    """A primary: first the take-over, then uploads."""

    number: int
    run: bytes
    directory: Directory
    mode: int
    answers: Any
    is_clone: bool = False
    epoch: int = 0
    reign: Any = None
    must_open: bool = False
    shipped: dict[int, bytes] = field(default_factory=dict)
    """Contents by number, as this process believes them to be in the log."""
    lacks: bool = False
    """A local write failed after the commit was handed over: this process must end."""
    threads: list[Thread] = field(default_factory=list)
    ended: BaseException | None = None
    base_of: int | None = None
    is_standby: bool = False
    """It takes over from the log of other directories."""


@dataclass(eq=False)
class Thread:
    """A procedure of a process, and the request that it waits for."""

    process: Process
    steps: Any
    upload: Any = None
    request: Any = None
    is_base: bool = False


class World:
    """Runs one course of events."""

    def __init__(self, protocol: ModuleType, seed: int, answers: ModuleType = right_answers) -> None:
        self.protocol = protocol
        self.answers = answers
        self.random = Random(seed)
        self.modes = Random(seed)
        self.reads = Random(seed)
        self.clones = Random(seed)
        self.bucket: dict[str, tuple[bytes, str]] = {}
        self.versions = 0
        self.late: list[Any] = []
        self.directories = [Directory({1: b"first", 2: b"second"})]
        self.backups = [self.directories[0].copy()]
        self.processes: list[Process] = []
        self.claims: dict[int, set[bytes]] = {}
        self.calm = False
        self.contents = 0
        #: The commits before the opening segments of the log, by the number of the last: what a base has.
        self.opened: dict[int, dict[int, bytes]] = {}
        self.begun: set[int] = set()
        self.wrong: str | None = None

    # --- the object store ---

    def land(self, request: Any) -> Any:
        found = self.bucket.get(request.name)
        if isinstance(request, self.protocol.Get):
            return None if found is None else self.protocol.Fetched(*found)
        is_create = isinstance(request, self.protocol.Create)
        if (found is not None) if is_create else (found is None or found[1] != request.etag):
            return self.protocol.Verdict.REFUSED
        self.versions += 1
        self.bucket[request.name] = (request.data, str(self.versions))
        return self.protocol.Verdict.DONE

    def answered(self, request: Any) -> Any:
        chance = self.random.random()
        if self.calm or chance < 0.7 or isinstance(request, self.protocol.Get):
            return self.land(request)
        if chance < 0.8:
            self.land(request)
            return self.protocol.Verdict.UNKNOWN
        if chance < 0.93:
            self.late.append(request)
            return self.protocol.Verdict.UNKNOWN
        return self.protocol.Verdict.REFUSED  # another write was under way

    # --- processes ---

    def start(self, directory: Directory, run: bytes | None = None) -> Process:
        is_clone = run is not None
        run = run or self.random.randbytes(16)
        process = self.process(run, directory, is_clone=is_clone)
        steps = self.protocol.take_over(process.run, self.protocol.ROOT, known=directory.epoch)
        self.advance(self.thread(process, steps), None)
        return process

    def process(self, run: bytes, directory: Directory, **options: bool) -> Process:
        mode, answers = self.modes.choice([ASYNC, SYNC, SYNC]), self.answers.PendingAnswers()
        process = Process(len(self.processes), run, directory, mode, answers, **options)
        self.processes.append(process)
        return process

    def thread(self, process: Process, steps: Any, upload: Any = None, *, is_base: bool = False) -> Thread:
        thread = Thread(process, self.apart(steps), upload, is_base=is_base)
        process.threads.append(thread)
        return thread

    def apart(self, steps: Any) -> Any:
        """Read objects that a procedure reads at once at different moments, in any order, and not always all of them."""
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as done:
                return done.value
            if not isinstance(request, self.protocol.GetAll):
                answer = yield request
                continue
            names = request.names[: self.reads.randint(1, len(request.names))]
            found: dict[str, Any] = dict.fromkeys(names)
            for name in self.reads.sample(names, len(names)):
                found[name] = yield self.protocol.Get(name)
            answer = list(found.values())

    def advance(self, thread: Thread, answer: Any) -> None:
        process = thread.process
        try:
            request = thread.steps.send(answer)
            while isinstance(request, self.protocol.Apply):
                for segment in request.segments:
                    self.apply(process, segment)
                request = thread.steps.send(None)
            thread.request = request
        except StopIteration as done:
            process.threads.remove(thread)
            self.finished(process, thread, done.value)
        except (
            self.protocol.ReignOver,
            self.protocol.BucketWentBack,
            self.protocol.TakeOverLost,
            self.protocol.Foreign,
            DamagedLog,
            Diverged,
        ) as error:
            self.end(process, error)

    def end(self, process: Process, error: BaseException | None) -> None:
        process.ended = error or RuntimeError("killed")
        process.answers.close("ended")
        # A request that is under way when its process ends may still take effect.
        for thread in process.threads:
            if thread.request is not None and not isinstance(thread.request, self.protocol.Get):
                self.late.append(thread.request)
        process.threads.clear()
        if isinstance(error, DamagedLog):
            self.wrong = f"the log cannot be read: {error}"
        is_deposed = isinstance(error, self.protocol.ReignOver) and process.epoch
        if is_deposed and not self.clones_of(process) and self.chain()[0][-1] <= process.epoch:
            self.wrong = "a process ended though nothing ended its epoch"

    def clones_of(self, process: Process) -> bool:
        return any(each.run == process.run and each is not process for each in self.processes)

    def apply(self, process: Process, segment: Any) -> None:
        """Rule 8: what the log has and the directory lacks is applied; other contents are refused."""
        mine = process.directory
        if process.is_standby and not segment.commits and not mine.commits:
            mine.commits.update(self.opened[segment.last])
        if segment.first > mine.last + 1:
            raise Diverged("the directory is older than the log")
        for number, commit in enumerate(segment.commits, segment.first):
            content = commit.changes[0].value
            if mine.commits.get(number, content) != content:
                raise Diverged(f"commit {number}")
            mine.commits[number] = content
            process.shipped[number] = content

    def finished(self, process: Process, thread: Thread, value: Any) -> None:
        if thread.upload is not None:
            process.reign.stored(thread.upload.number)
        elif thread.is_base:
            process.reign.based()
        else:
            if process.is_standby:
                self.compare(process, value)
            process.epoch = process.directory.epoch = value.epoch
            if value.epoch in self.begun:
                self.wrong = f"two processes have begun epoch {value.epoch}"
            self.begun.add(value.epoch)
            has_base = any(name.startswith("bases/") for name in self.bucket)
            process.reign = self.protocol.Reign(value, process.run, process.mode, has_base=has_base)
            process.must_open = value.commit is None
            process.base_of = None if has_base and value.commit is not None else process.directory.last
        process.answers.advance(process.reign.counted, process.directory.last)
        self.note_counted(process)

    def compare(self, process: Process, place: Any) -> None:
        """Check that a standby has what the log says up to its own seal."""
        log = self.chain()[1]
        log = {n: content for n, content in log.items() if self.last_opened <= n <= (place.commit or 0)}
        mine = {n: content for n, content in process.directory.commits.items() if n >= self.last_opened}
        if place.commit is None or process.directory.last != place.commit or log != mine:
            self.wrong = f"a standby that took over has {process.directory.last}, and the log {place.commit}"

    def note_counted(self, process: Process) -> None:
        counted = process.reign.counted
        if counted is None:
            return
        if not any(name.startswith("bases/") for name in self.bucket):
            self.wrong = "commits count without a base"
        for number, content in process.shipped.items():
            if number <= counted:
                self.claims.setdefault(number, set()).add(content)

    # --- what a primary does ---

    def content(self) -> bytes:
        self.contents += 1
        return b"content %d" % self.contents

    def write(self, process: Process) -> None:
        content = process.directory.commits[process.directory.last + 1] = self.content()
        number = process.directory.last
        if process.mode == SYNC:
            process.answers.when(number, 0.0, partial(self.acknowledged, number, content))
        elif process.reign.says_mode and (process.epoch, ASYNC) not in self.logged_modes():
            self.wrong = "a commit was acknowledged at once, and the log does not say that this may be"

    def acknowledged(self, number: int, content: bytes, failed: Exception | None) -> None:
        """Answer a client, or show a commit to one. From then on it must not be lost."""
        if failed is None:
            self.claims.setdefault(number, set()).add(content)
            if not any(name.startswith("bases/") for name in self.bucket):
                self.wrong = "a commit was acknowledged without a base"

    def read(self, process: Process) -> None:
        """Read the last row of the directory, as readers do that do not ask an actor."""
        number = process.directory.last
        if process.mode == SYNC and process.answers.has_begun and process.answers.may_show(number):
            self.acknowledged(number, process.directory.commits[number], None)

    def logged_modes(self) -> set[tuple[int, int]]:
        """Return the epochs and modes of all segments in the object store."""
        segments = [decode_segment(data) for data, _ in self.bucket.values() if is_segment(data)]
        return {(segment.epoch, segment.mode) for segment in segments}

    def ship(self, process: Process) -> None:
        reign = process.reign
        if process.must_open:
            process.must_open = False
            upload = reign.open(process.base_of, 0)
            commits = process.directory.commits
            self.opened[process.base_of] = {n: commits[n] for n in commits if n <= process.base_of}
            self.advance(self.thread(process, self.protocol.store(upload), upload), None)
        elif process.base_of is not None and reign.logged is not None and reign.logged >= process.base_of:
            name = f"bases/{reign.epoch:020}/{process.base_of}"
            process.base_of = None
            self.advance(self.thread(process, self.base(name), is_base=True), None)
        elif reign.last < process.directory.last:
            first = reign.last + 1
            numbers = range(first, min(process.directory.last, first + self.random.randrange(2)) + 1)
            self.hand_over(process, first, [process.directory.commits[number] for number in numbers])
        elif process.mode == ASYNC and reign.place.number == 1:
            upload = reign.announce(0)
            self.advance(self.thread(process, self.protocol.store(upload), upload), None)

    def base(self, name: str) -> Any:
        while (yield self.protocol.Create(name, b"base")) is not self.protocol.Verdict.DONE:
            if (yield self.protocol.Get(name)) is not None:
                return

    def hand_over(self, process: Process, first: int, contents: list[bytes]) -> None:
        commits = [Commit(1, (Change(Table.MESSAGE, b"k", content),)) for content in contents]
        try:
            upload = process.reign.cut(first, commits)
        except self.protocol.NumberReused as error:
            self.end(process, None)
            assert process.lacks, error
            return
        process.shipped.update(enumerate(contents, first))
        self.advance(self.thread(process, self.protocol.store(upload), upload), None)

    def fail_locally(self, process: Process) -> None:
        """Hand a commit over whose local write then fails; then use its number again, as a careless store would."""
        if process.must_open or process.reign.last is None or process.reign.last != process.directory.last:
            return
        number = process.reign.last + 1
        self.hand_over(process, number, [self.content()])
        if process.ended is None:
            process.lacks = True
            self.hand_over(process, number, [self.content()])

    # --- the course of events ---

    @property
    def live(self) -> list[Process]:
        return [process for process in self.processes if process.ended is None]

    def step(self) -> None:
        chance, live = self.random.random(), self.live
        threads = [thread for process in live for thread in process.threads]
        reigning = [process for process in live if process.reign is not None]
        if self.clones.random() < CLONES and reigning and len(live) < 4:
            self.clone(self.clones.choice(reigning))
        if chance < 0.58 and threads:
            thread = self.random.choice(threads)
            self.advance(thread, self.answered(thread.request))
        elif chance < 0.63 and self.late:
            self.land(self.late.pop(self.random.randrange(len(self.late))))
        elif chance < 0.94 and reigning:
            process = self.random.choice(reigning)
            chance = self.random.random()
            if chance < 0.4:
                self.write(process)
                self.read(process)
            elif len(process.threads) < UPLOADS:
                self.ship(process)
        elif chance < 0.945 and reigning:
            self.fail_locally(self.random.choice(reigning))
        elif chance < 0.96 and reigning:
            self.give_up(self.random.choice(reigning))
        elif chance < 0.968 and live:
            self.end(self.random.choice(live), None)
        elif chance < 0.972:
            self.directories.append(self.random.choice(self.directories).copy())
        elif chance < 0.976:
            self.backups.append(self.random.choice(self.directories).copy())
        elif chance < 0.991 and len(live) < 3:
            self.start_any()
        elif len(live) < 4:
            self.start_standby()

    def start_any(self) -> None:
        used = [process.directory for process in self.live]
        free = [each for each in self.directories if not any(each is other for other in used)]
        chance = self.random.random()
        beginning = [process for process in self.live if process.reign is None]
        if chance < 0.45 and beginning:  # a machine was cloned; later, its clone would begin an epoch of its own
            model = self.random.choice(beginning)
            self.directories.append(model.directory.copy())
            self.start(self.directories[-1], model.run)
        elif chance < 0.6:  # an earlier state of a disk
            self.directories.append(self.random.choice(self.backups).copy())
            self.start(self.directories[-1])
        elif free:
            self.start(self.random.choice(free))

    def clone(self, model: Process) -> None:
        """The machine of a running primary is cloned: from now on two processes with one run write in one epoch."""
        directory = model.directory.copy()
        self.directories.append(directory)
        process = self.process(model.run, directory, is_clone=True)
        process.mode, process.epoch, process.reign = model.mode, model.epoch, deepcopy(model.reign)
        process.must_open, process.base_of, process.lacks = model.must_open, model.base_of, model.lacks
        process.shipped = dict(model.shipped)
        process.answers.advance(process.reign.counted, directory.last)
        for thread in model.threads:
            if thread.upload is not None:
                self.advance(self.thread(process, self.protocol.store(thread.upload), thread.upload), None)
            elif thread.is_base:
                self.advance(self.thread(process, self.base(thread.request.name), is_base=True), None)

    def give_up(self, process: Process) -> None:
        """Too many commits wait: the epoch ends with a gap, and another run of the process begins with a new base."""
        if process.threads or process.must_open or process.is_clone or self.clones_of(process):
            return
        place, directory = process.reign.place, process.directory
        self.end(process, None)
        directory.commits[directory.last + 1] = self.content()
        following = self.process(self.random.randbytes(16), directory)
        runs = frozenset([process.run, following.run])
        own = self.protocol.OwnDirectory(directory.last, runs, directory.last, writer=process.run)
        steps = self.protocol.take_over(following.run, place, known=directory.epoch, directory=own)
        self.advance(self.thread(following, steps), None)

    def start_standby(self) -> None:
        """A standby takes over: by hand, or because it has seen a lease that may have been renewed since."""
        if not any(name.startswith("bases/") for name in self.bucket):
            return
        directory = Directory()
        self.directories.append(directory)
        process = self.process(self.random.randbytes(16), directory, is_standby=True)
        self.advance(self.thread(process, self.standby(process)), None)

    def standby(self, process: Process) -> Any:
        protocol = self.protocol
        by_hand = self.random.random() < 0.5
        found = yield protocol.Get(LEASE)
        seen = None if found is None or by_hand else protocol.decode_lease(found.data)
        place = yield from self.following(process)
        return (yield from protocol.take_over(process.run, place, known=place.epoch, follower=protocol.Follower(seen)))

    def following(self, process: Process) -> Any:
        """Read the log to its end, several objects at once, and begin with a base after each gap."""
        protocol, place, ahead = self.protocol, self.protocol.ROOT, self.protocol.ReadAhead()
        while True:
            found = yield protocol.GetAll(ahead.names(place))
            objects = [None if each is None else each.data for each in found]
            ahead.took(objects)
            if objects[0] is None:
                return place
            for batch in protocol.batches_after(place, objects):
                if batch.segments:
                    yield protocol.Apply(batch.segments)
                if place.commit is not None and batch.place.commit is None:
                    process.directory.commits.clear()
                place = batch.place

    def run(self) -> str | None:
        try:
            self.start(self.directories[0])
            for _ in range(STEPS):
                self.step()
                if self.wrong:
                    return self.wrong
            return self.heal() or self.judged()
        except DamagedLog as error:
            return f"the log cannot be read: {error}"

    def heal(self) -> str | None:
        """Without faults, the directory of the last winner can be started again, and all its commits count."""
        self.calm = True
        for process in self.live:
            self.end(process, None)
        while self.late:
            self.land(self.late.pop())
        winners = [process for process in self.processes if process.epoch == self.chain()[0][-1]]
        if len(winners) != 1:
            return None  # clones: one of them was fenced by the other's segment, at whatever place
        process = self.start(winners[0].directory)
        for _ in range(2000):
            if process.ended is not None:
                return self.wrong or f"the last winner cannot start again: {process.ended!r}"
            if process.threads:
                thread = process.threads[0]
                self.advance(thread, self.answered(thread.request))
            elif process.reign.counted == process.directory.last:
                break
            else:
                self.ship(process)
        else:
            return "the log does not come to an end"
        log, opened = self.chain()[1], self.last_opened
        lost = [n for n, content in process.directory.commits.items() if n >= opened > 0 and log.get(n) != content]
        return f"commits {lost} of the last winner are not in the log" if lost else self.wrong

    def judged(self) -> str | None:
        log = self.chain()[1]
        for number, contents in self.claims.items():
            if contents != {log.get(number)}:
                return f"commit {number} counted as {contents}, and the log has {log.get(number)!r}"
        return self.wrong

    def chain(self) -> tuple[list[int], dict[int, bytes]]:
        """Return the epochs of the log and its commits, read strictly by the rules, without the code under test."""
        epochs, log, before, last = [0], {}, NOTHING_BEFORE, None
        self.last_opened = 0
        number, is_void = 1, False
        while (found := self.bucket.get(log_name(epochs[-1], number))) is not None:
            data = found[0]
            if is_segment(data):
                segment = decode_segment(data)
                # This segment is a clone's, and follows one that is not in the log: nothing counts up to the seal.
                is_void = is_void or segment.before != before
                if is_void:
                    number += 1
                    continue
                if last is not None and segment.first != last + 1:
                    raise DamagedLog(f"segment {number} of epoch {epochs[-1]}")
                self.last_opened = self.last_opened or segment.first
                log.update((segment.first + i, each.changes[0].value) for i, each in enumerate(segment.commits))
                last, number = segment.last, number + 1
            else:
                epochs.append(decode_seal(data).next)
                number, is_void = 1, False
                if decode_seal(data).gap:
                    last, self.last_opened = None, 0
            before = digest(data)
        return epochs, log
