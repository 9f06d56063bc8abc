"""Faults of one daemon while clients are active; each fault is over when its function returns."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from tests.cluster.harness import shifted_clock, why_no_wrong_clocks, write_shift
from tests.storage.disks import fill
from tests.torture.course import SMALLEST, Attack, Verdict, life, restarted
from tests.torture.disk import Plan

HOUR_S = 3_600
#: Time limit for a response of /livez while the disk is stalled; generous, for busy machines.
ALIVE_S = 10.0

Fault = Callable[[Attack], Awaitable[None]]


async def killed(attack: Attack) -> None:
    """Send SIGKILL, and restart the daemon."""
    await restarted(attack, attack.lone.daemon.kill)


async def stopped(attack: Attack) -> None:
    """Send SIGTERM, as in an upgrade, and restart the daemon."""

    def stop() -> None:
        code = attack.lone.daemon.stop()
        if code:
            attack.verdict.surprises.append(f"it left with {code}")

    await restarted(attack, stop)


async def paused(attack: Attack) -> None:
    """Send SIGSTOP, and later SIGCONT."""
    attack.lone.daemon.signal(signal.SIGSTOP)
    await trio.sleep(attack.rng.uniform(0.1, 1.5))
    attack.lone.daemon.signal(signal.SIGCONT)


async def syncs_stall(attack: Attack) -> None:
    """Block syncs for a while."""
    attack.disk.stall(("sync",))
    await _alive_while_it_lasts(attack)


async def writes_stall(attack: Attack) -> None:
    """Block all calls for a while."""
    attack.disk.stall()
    await _alive_while_it_lasts(attack)


async def _alive_while_it_lasts(attack: Attack) -> None:
    """Check that /livez answers: during the stall, or right after it if the event loop may itself write to the disk."""
    answered = trio.Event()

    async def ask() -> None:
        async with attack.stage.voice(3) as voice:
            await voice.ask("GET", "/livez")
        answered.set()

    async with trio.open_nursery() as nursery:
        try:
            await trio.sleep(attack.rng.uniform(0.3, 2))
            nursery.start_soon(ask)
            with trio.move_on_after(ALIVE_S if attack.thread_writes else 0.1):
                await answered.wait()
            if attack.thread_writes and not answered.is_set():
                attack.verdict.surprises.append("it does not answer /livez while its disk is stalled")
        finally:
            attack.disk.heal()
        with trio.move_on_after(ALIVE_S):
            await answered.wait()
        if not answered.is_set():
            attack.verdict.surprises.append("it does not answer /livez once its disk responds again")
        nursery.cancel_scope.cancel()


async def slow(attack: Attack) -> None:
    """Make every call take 20 ms longer for a while."""
    attack.disk.slow(0.02)
    await trio.sleep(1.5)
    attack.disk.heal()


async def calls_fail(attack: Attack) -> None:
    """Make some calls fail, a few of them torn, with time to recover in between."""
    error = attack.rng.choice((errno.EIO, errno.ENOSPC))
    plan = Plan(attack.rng.randint(1, 40), 1 << 32, 151, error=error, torn=attack.rng.random() < 0.5)
    attack.disk.fail(plan)
    await trio.sleep(2)
    attack.disk.heal()


async def short_writes(attack: Attack) -> None:
    """Make every other write store half of its bytes."""
    attack.disk.fail(Plan(1, 1 << 32, 2, error=0))
    await trio.sleep(1)
    attack.disk.heal()


async def disk_full(attack: Attack) -> None:
    """Fill the file system to its last byte, and free it again."""
    ballast = await trio.to_thread.run_sync(fill, attack.disk.root.parent)
    await trio.sleep(attack.rng.uniform(0.3, 1.5))
    ballast.unlink()


def clock_jumps(shift: Path, ahead_s: int) -> Fault:
    """Make the clock jump by ``ahead_s``, and back."""

    async def jump(attack: Attack) -> None:
        write_shift(shift, ahead_s)
        await trio.sleep(1.5)
        write_shift(shift, 0)

    return jump


#: Faults by their names in the report.
ALWAYS: dict[str, Fault] = {
    "killed, and started again": killed,
    "stopped, and started again": stopped,
    "frozen (SIGSTOP) for up to 1.5 s": paused,
    "no sync returns for up to 2 s": syncs_stall,
    "no call to the disk returns for up to 2 s": writes_stall,
    "every call to the disk takes 20 ms longer": slow,
    "calls fail with EIO or ENOSPC, some writes torn": calls_fail,
    "every other write is short": short_writes,
}


def on_a_disk_of_its_own(directory: Path) -> bool:
    """True if the directory's file system can be filled up without affecting others."""
    return os.path.ismount(directory)


async def storm(
    directory: Path, made: Path, seed: int, *, rounds: int = 1, clocks: bool = False, sizes: str = SMALLEST
) -> Verdict:
    """Run one daemon and make every fault, one after another, with acknowledgements before and after each.

    Args:
      rounds: number of times that each fault is made.
      sizes: the sizes of its store.
      clocks: True if the clock also jumps, which requires libfaketime.
    """
    kinds, environ = dict(ALWAYS), {}
    if on_a_disk_of_its_own(directory):
        kinds["the file system is full"] = disk_full
    if clocks and why_no_wrong_clocks() is None:
        shift = directory / "shift"
        write_shift(shift, 0)
        environ = shifted_clock(shift)
        kinds["the clock jumps ahead by an hour, and back"] = clock_jumps(shift, HOUR_S)
        kinds["the clock jumps back by an hour, and ahead"] = clock_jumps(shift, -HOUR_S)

    async def work(attack: Attack) -> None:
        await attack.stage.more(20)
        for _ in range(rounds):
            for name in attack.rng.sample(sorted(kinds), len(kinds)):
                await kinds[name](attack)
                attack.made[name] += 1
                await attack.stage.more(20)

    return await life(directory, made, "every fault in turn", seed, work, environ=environ, sizes=sizes)
