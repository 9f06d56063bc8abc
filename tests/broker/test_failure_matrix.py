"""The failure matrix: whichever write of a transaction fails, and in whatever way, readers get all of it or nothing."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from math import inf

import pytest
from whole_course import NAMES, Failed, Killed, Scene, life

#: Far more writes than any course has.
ENOUGH = 40


async def course(scene, end, arm):
    """Run a transaction in steps. ``arm`` is called where faults may begin, after all readers have polled."""
    if end == "commit":
        arm()
    transaction, _ = await scene.begin()
    yield transaction
    stores = [await scene.store_messages("a", 2, transaction)]
    yield transaction
    stores.append(await scene.store_messages("a", 1, transaction))
    yield transaction
    await scene.publish("a", 1, transaction, stores)
    yield transaction
    # Send one message per request: a store that tears commits, as "one row written" does, may also tear requests.
    await scene.publish("b", 1, transaction)
    yield transaction
    await scene.publish("b", 1, transaction)
    await scene.publish("b", 1)
    yield transaction
    if end != "commit":  # until here all courses are the same
        await scene.look()
        arm()
    else:
        await scene.post(f"/v1/transactions/{transaction.id}/prepare", {"changes": ["cm93"]})
        yield transaction
    if end == "rollback":
        for topic in NAMES:
            await scene.roll_back(topic, transaction)
            yield transaction
    if end != "time-out":
        await scene.decide(transaction, {"rollback": "abort"}.get(end, end))
    else:
        await scene.pass_time(31)
    yield transaction
    if end in ("invalidate", "time-out"):
        await scene.invalid_pass()
        yield transaction


async def prepare(scene):
    for topic in NAMES:
        await scene.daemon.create(topic)
        await scene.publish(topic, 1)
    await scene.bring_snapshot()


async def run_until_it_fails(scene, end, arm, *, killed, polls_early):
    """Return the transaction as its client recorded it; None if even the begin was not answered.

    Every reader polls after each step, but before ``arm`` is called only if ``polls_early``.
    """
    known = None
    try:
        async with aclosing(course(scene, end, arm)) as steps:
            async for transaction in steps:
                known = transaction
                if scene.has_failed and killed:
                    break
                if polls_early or scene.is_armed:
                    await scene.look()
    except Failed:
        assert scene.has_failed
    return known


async def come_back(scene, transaction):
    """Recover as a client does after an error: repeat a requested commit, abort anything else."""
    if transaction is not None:
        await scene.insist(scene.decide, transaction, "commit" if transaction.asked_s < inf else "abort")


async def one_case(end, number, applied, *, killed, dies):
    """Run the course and fail write ``number``. True if there was such a write."""
    scene = Scene()
    async with life(scene.store) as scene.daemon:
        await prepare(scene)
        arm = partial(scene.fail_write, number, applied)
        # The steps before ``arm`` are the same for each number.
        transaction = await run_until_it_fails(scene, end, arm, killed=killed, polls_early=number == 0)
        hit = scene.has_failed
        if not (killed and hit):
            await afterwards(scene, None if dies else transaction)
            return hit
        moment_ms = scene.daemon.clock.ms
        raise Killed
    async with life(scene.store) as scene.daemon:
        scene.daemon.clock.ms = moment_ms
        await afterwards(scene, None if dies else transaction)
    return True


async def afterwards(scene, transaction):
    await scene.look()
    await come_back(scene, transaction)
    await scene.look()
    await scene.insist(scene.bring_snapshot)
    await scene.look()
    for topic in NAMES:
        await scene.insist(scene.publish, topic, 1)
    await scene.look()
    await scene.check()


#: Ends of a transaction, and the minimum number of writes that can fail; for ``commit``, from the begin on.
WRITES = {"commit": 9, "abort": 4, "rollback": 3, "invalidate": 3, "time-out": 3}


@pytest.mark.parametrize(
    "applied",
    [
        pytest.param(False, id="nothing written"),
        pytest.param(1, id="one row written"),
        pytest.param(2, id="two rows written", marks=pytest.mark.torture),
        pytest.param(3, id="three rows written", marks=pytest.mark.torture),
        pytest.param(True, id="all written"),
    ],
)
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(None, id="every other pair is killed"),
        pytest.param(False, id="falls", marks=pytest.mark.torture),
        pytest.param(True, id="killed", marks=pytest.mark.torture),
    ],
)
@pytest.mark.parametrize(
    "client",
    [
        "every other one dies",
        pytest.param("comes back", marks=pytest.mark.torture),
        pytest.param("dies", marks=pytest.mark.torture),
    ],
)
@pytest.mark.parametrize("end", WRITES)
async def test_a_transaction_is_whole_or_absent_whichever_of_its_writes_fails(
    autojump_clock, end, client, killed, applied
):
    # If every other client dies, it dies in the cases where nothing or one row was written, or in those where all rows
    # were.
    for number in range(ENOUGH):
        dies = client == "dies" or (client == "every other one dies" and (number + (applied is True)) % 2 == 1)
        # In pairs, so that daemons are killed with clients that die and with clients that come back.
        kills = (number // 2 + (applied is False)) % 2 == 1 if killed is None else killed
        if not await one_case(end, number, applied, killed=kills, dies=dies):
            break
    assert WRITES[end] <= number < ENOUGH
