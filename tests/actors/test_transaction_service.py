"""The transaction service at work: durable before it answers, loaded again when it falls, aborts that roll back first."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from actors_in_process import SetClock
from transactions_in_process import OTHER, TOPIC, serving, settle

from plainsong.protocol.errors import (
    InvalidParameter,
    OutcomeUnknown,
    Overloaded,
    PlainsongError,
    Recovering,
    ShuttingDown,
    TopicNotFound,
    TransactionConflict,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionsUnavailable,
)
from plainsong.protocol.tephra.state import decode_snapshot, decode_transaction, encode_transaction
from plainsong.protocol.transactions.transaction import TransactionType
from storage.faulty import FaultyStore
from storage.leveldb.store import LevelDBStore
from storage.memory import MemoryStore


async def caught(call, *args):
    """The error of a call, or what it returned."""
    try:
        return await call(*args)
    except PlainsongError as error:
        return error


@pytest.fixture
def results(nursery):
    """Start a call; its outcome is in the list it gives once it has one."""

    def start(call, *args):
        found = []

        async def run():
            found.append(await caught(call, *args))

        nursery.start_soon(run)
        return found

    return start


# --- durable before it answers ---------------------------------------------------------------------


async def test_nothing_is_answered_or_seen_before_it_is_durable(results):
    async with serving() as world:
        one = await world.new()
        world.store.stall("write")
        answer = results(world.service.commit, one)
        await settle()
        assert (answer, world.verdict(one), world.service.standing(one)) == ([], "hold", "deciding")
        world.store.release("write")
        await settle()
        assert answer[0].state == "committed"
        assert world.verdict(one) == "deliver"


async def test_a_begin_is_durable_before_its_pointer_is_known(results):
    async with serving() as world:
        world.store.stall("write")
        answer = results(world.service.begin)
        await settle()
        assert not answer
        world.store.crash()
        await settle()
        assert isinstance(answer[0], OutcomeUnknown)


async def test_requests_that_come_meanwhile_share_one_commit(results):
    async with serving() as world:
        writes, write = [], world.store.write

        async def counted(commit, **more):
            writes.append(commit)
            await write(commit, **more)

        world.store.write = counted
        world.store.stall("write")
        answers = [results(world.service.begin)]
        await settle()
        answers += [results(world.service.begin) for _ in range(19)]
        await settle()
        world.store.release("write")
        await settle()
        assert len({answer[0].transaction.transaction_id for answer in answers}) == 20
        assert len(writes) == 2


async def test_reads_say_what_is_durable(results):
    async with serving() as world:
        one = await world.new()
        world.store.stall("write")
        results(world.service.invalidate, one)
        await settle()
        status = results(world.service.look, one)
        await settle()
        assert not status
        assert world.service.begin_pass().invalids == ()
        assert decode_snapshot(world.service.snapshot()).invalids == ()
        world.store.release("write")
        await settle()
        assert status[0].state == "invalid"
        assert world.service.begin_pass().invalids == (one,)


# --- when the store fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True])
async def test_a_commit_that_met_a_failure_is_unknown_and_can_be_asked_for(applied):
    async with serving() as world:
        one = await world.new()
        loaded = world.loaded
        world.store.fail_next("write", applied=10 if applied else 0)
        with pytest.raises(OutcomeUnknown):
            await world.service.commit(one)
        await loaded.wait()
        assert (await world.service.look(one)).state == ("committed" if applied else "in_progress")
        assert (await world.service.commit(one)).changed is not applied
        assert world.counts.falls == 1


async def test_while_it_is_down_every_call_says_so_and_so_does_a_pointers_standing(results):
    async with serving() as world:
        one = await world.new()
        world.store.stall("claim")
        world.store.fail_next("write")
        with pytest.raises(OutcomeUnknown):
            await world.service.commit(one)
        await settle()
        service = world.service
        for call in (service.view, service.figures, service.begin_pass, service.snapshot, service.pruning):
            with pytest.raises(TransactionsUnavailable):
                call()
        with pytest.raises(TransactionsUnavailable):
            service.standing(one)
        for call in (service.begin, service.reset):
            with pytest.raises(TransactionsUnavailable):
                await call()
        for call in (service.commit, service.abort, service.invalidate, service.look, service.checkpoint):
            with pytest.raises(TransactionsUnavailable):
                await call(one)
        world.store.release("claim")
        await settle()
        assert (await service.commit(one)).state == "committed"


async def test_before_the_first_load_nothing_is_taken():
    async with serving() as world:
        other = type(world)(FaultyStore(MemoryStore()), SetClock())
        with pytest.raises(TransactionsUnavailable):
            await other.service.begin()


async def test_it_is_loaded_again_as_often_as_it_takes(autojump_clock):
    async with serving() as world:
        one = await world.new()
        world.store.fail_next("write")
        for _ in range(3):
            world.store.fail_next("scan")
        loaded = world.loaded
        await caught(world.service.commit, one)
        await loaded.wait()
        assert world.counts.falls == 4
        assert (await world.service.commit(one)).state == "committed"


@pytest.mark.parametrize("rows", range(5))
async def test_a_power_cut_at_any_row_of_a_commit_leaves_it_open_or_committed(rows, results):
    async with serving() as world:
        one, two = await world.new(), await world.new()
        await world.service.prepare(one, [b"k"])
        await world.service.prepare(two, [b"k"])
        loaded = world.loaded
        world.store.stall("write")
        answer = results(world.service.commit, one)
        await settle()
        world.store.crash(keep_rows=rows)
        await loaded.wait()
        assert isinstance(answer[0], OutcomeUnknown)
        state = (await world.service.look(one)).state
        assert state == ("committed" if rows >= 3 else "in_progress")
        assert world.verdict(one) == ("deliver" if rows >= 3 else "hold")
        await world.service.commit(one)
        with pytest.raises(TransactionConflict):
            await world.service.commit(two)
        assert world.counts.conflicts == 1


async def test_ids_and_decisions_survive_on_leveldb_though_the_clock_went_back(tmp_path):
    clock = SetClock()
    async with await LevelDBStore.open(tmp_path) as store, serving(store, clock) as world:
        done, gone, open_, long = [await world.new() for _ in range(3)] + [await world.new(type=TransactionType.LONG)]
        await world.service.prepare(done, [b"k"])
        await world.service.commit(done)
        await world.service.invalidate(gone)
        last = (await world.service.checkpoint(long)).transaction.write_pointer
    clock.ms -= 3_600_000
    async with await LevelDBStore.open(tmp_path) as store, serving(store, clock) as world:
        assert [(await world.service.look(each)).state for each in (done, gone, open_, long)] == [
            "committed",
            "invalid",
            "in_progress",
            "in_progress",
        ]
        assert [world.verdict(each) for each in (done, gone, open_, last)] == ["deliver", "skip", "hold", "hold"]
        assert await world.new() > last
        with pytest.raises(TransactionConflict):
            await world.service.prepare(open_, [b"k"])


# --- deadlines ---------------------------------------------------------------------------------------


async def test_a_time_out_comes_by_itself_is_durable_and_wakes_who_waits(autojump_clock, results):
    async with serving() as world:
        one = await world.new(timeout_s=5)
        woken = results(world.index.wait, one)
        await trio.sleep(4.9)
        assert (woken, world.verdict(one)) == ([], "hold")
        await trio.sleep(0.2)
        assert woken
        assert (world.verdict(one), world.counts.decisions, world.counts.time_outs) == ("skip", ["invalid"], 1)
        with pytest.raises(TransactionNotInProgress):
            await world.service.commit(one)


async def test_a_commit_or_abort_wakes_who_waits_for_it(results):
    async with serving() as world:
        one, two = await world.new(), await world.new()
        woken = [results(world.index.wait, each) for each in (one, two)]
        await settle()
        await world.service.commit(one)
        await settle()
        assert [bool(each) for each in woken] == [True, False]
        await world.service.abort(two)
        await settle()
        assert woken[1]


# --- commits and what is being written ---------------------------------------------------------------


async def test_a_commit_waits_for_what_is_being_written_and_lets_nothing_more_in(results):
    async with serving() as world:
        one, written = await world.new(), trio.Event()
        publish = results(world.topics.publish, world.service, one, written)
        await settle()
        commits = [results(world.service.commit, one) for _ in range(2)]
        await settle()
        assert commits == [[], []]
        late = await caught(world.topics.publish, world.service, one, written)
        assert isinstance(late, TransactionNotInProgress)
        assert isinstance(await caught(world.service.abort, one), TransactionNotInProgress)
        written.set()
        await settle()
        assert publish == [None]
        assert sorted(each[0].changed for each in commits) == [False, True]
        assert world.index.take_decided(TOPIC) == [one]


async def test_others_are_served_while_a_commit_waits(results):
    async with serving() as world:
        one, written = await world.new(), trio.Event()
        results(world.topics.publish, world.service, one, written)
        await settle()
        commit = results(world.service.commit, one)
        two = await world.new()
        assert (await world.service.commit(two)).changed
        assert not commit
        written.set()


async def test_a_commit_that_waits_when_the_service_falls_has_not_happened(results):
    async with serving() as world:
        one, two, written = await world.new(), await world.new(), trio.Event()
        results(world.topics.publish, world.service, one, written)
        await settle()
        commit = results(world.service.commit, one)
        await settle()
        loaded = world.loaded
        world.store.fail_next("write")
        await caught(world.service.commit, two)
        await loaded.wait()
        assert isinstance(commit[0], TransactionsUnavailable)
        assert world.service.standing(one) == "in_progress"
        written.set()
        await settle()
        assert (await world.service.commit(one)).changed


# --- aborts go to the topics first -------------------------------------------------------------------


async def test_an_abort_rolls_back_everywhere_before_it_is_answered(results):
    async with serving() as world:
        one = await world.new()
        two = (await world.service.checkpoint(one)).transaction.write_pointer
        world.topics.put(one, TOPIC)
        world.topics.put(two, OTHER)
        world.topics.stuck[OTHER] = trio.Event()
        answers = [results(world.service.abort, one) for _ in range(2)]
        await settle()
        assert answers == [[], []]
        assert world.service.standing(one) == "invalid"
        world.topics.stuck[OTHER].set()
        await settle()
        assert [each[0].state for each in answers] == ["aborted", "aborted"]
        assert world.topics.rolled_back == {(TOPIC, one), (OTHER, two)}
        assert world.index.take_decided(OTHER) == [two]


async def test_an_abort_also_rolls_back_what_is_just_being_written(results):
    async with serving() as world:
        one, written = await world.new(), trio.Event()
        results(world.topics.publish, world.service, one, written)
        await settle()
        abort = results(world.service.abort, one)
        await settle()
        assert world.topics.rolled_back == {(TOPIC, one)}
        assert abort[0].state == "aborted"
        written.set()


@pytest.mark.parametrize("error", [TopicNotFound("gone"), Recovering("later")])
async def test_an_abort_that_cannot_reach_a_topic_is_an_invalidation_and_says_so(error, autojump_clock):
    async with serving() as world:
        one = await world.new()
        world.topics.put(one, TOPIC)
        world.topics.put(one, OTHER)
        world.topics.failing[OTHER] = error
        assert (await world.service.abort(one)).state == "invalid"
        assert (TOPIC, one) in world.topics.rolled_back
        assert world.verdict(one) == "skip"
        del world.topics.failing[OTHER]
        assert (await world.service.abort(one)).state == "aborted"
        assert world.service.invalids() == ()


async def test_a_topic_that_cannot_just_now_is_asked_again(autojump_clock):
    async with serving() as world:
        one = await world.new()
        world.topics.put(one)
        world.topics.failing[TOPIC] = Overloaded("too much")

        async def recover():
            await trio.sleep(1)
            del world.topics.failing[TOPIC]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(recover)
            assert (await world.service.abort(one)).state == "aborted"


async def test_an_abort_happens_though_the_caller_left(results):
    async with serving() as world:
        one = await world.new()
        world.topics.put(one)
        world.topics.stuck[TOPIC] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.service.abort, one)
            await settle()
            nursery.cancel_scope.cancel()
        world.topics.stuck[TOPIC].set()
        await settle()
        assert (await world.service.look(one)).state == "aborted"


async def test_an_abort_cut_off_by_a_crash_goes_on_after_the_start():
    store = FaultyStore(MemoryStore())
    async with serving(store) as world:
        one = await world.new()
        world.topics.put(one)
        world.topics.stuck[TOPIC] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caught, world.service.abort, one)
            await settle()
            with pytest.raises(TransactionNotInProgress):
                await world.service.commit(one)
            world.service.close()
    async with serving(store, rows=[one]) as world:
        await settle()
        assert (await world.service.look(one)).state == "aborted"
        assert world.topics.rolled_back == {(TOPIC, one)}


async def test_an_abort_on_its_way_when_the_service_falls_is_unknown_and_goes_on(results):
    async with serving() as world:
        one, two = await world.new(), await world.new()
        world.topics.put(one)
        world.topics.stuck[TOPIC] = trio.Event()
        abort = results(world.service.abort, one)
        await settle()
        loaded = world.loaded
        world.store.fail_next("write")
        await caught(world.service.commit, two)
        await loaded.wait()
        assert isinstance(abort[0], OutcomeUnknown)
        assert world.service.standing(one) == "invalid"
        world.topics.stuck[TOPIC].set()
        await settle()
        assert (await world.service.look(one)).state == "aborted"


async def test_a_transaction_that_times_out_while_it_is_aborted_is_aborted_in_the_end(autojump_clock, results):
    async with serving() as world:
        one = await world.new(timeout_s=1)
        world.topics.put(one)
        world.topics.stuck[TOPIC] = trio.Event()
        abort = results(world.service.abort, one)
        await trio.sleep(2)
        assert world.service.invalids() == (one,)
        world.topics.stuck[TOPIC].set()
        await trio.sleep(1)
        assert abort[0].state == "aborted"
        assert world.service.invalids() == ()


async def test_a_long_abort_rolls_back_and_stays_invalid():
    async with serving() as world:
        one = await world.new(type=TransactionType.LONG)
        world.topics.put(one)
        assert (await world.service.abort(one)).state == "invalid"
        assert world.topics.rolled_back == {(TOPIC, one)}


# --- the invalid list --------------------------------------------------------------------------------


async def test_truncation_rolls_back_what_is_left_first_and_keeps_what_it_cannot_reach(autojump_clock):
    async with serving() as world:
        one, two, open_ = await world.new(), await world.new(), await world.new()
        for each in (one, two, open_):
            world.topics.put(each, OTHER if each == two else TOPIC)
        await world.service.invalidate(one)
        await world.service.invalidate(two)
        world.topics.failing[OTHER] = Recovering("later")
        assert await world.service.truncate([one, two, open_]) == 1
        assert world.topics.rolled_back == {(TOPIC, one)}
        assert world.service.invalids() == (two,)
        assert world.service.standing(open_) == "in_progress"


async def test_truncation_before_a_time_and_its_refusal():
    async with serving() as world:
        one = await world.new()
        world.clock.ms += 10
        open_ = await world.new()
        await world.service.invalidate(one)
        with pytest.raises(InvalidParameter):
            await world.service.truncate_before(world.clock.ms + 1)
        assert await world.service.truncate_before(world.clock.ms) == 1
        await world.service.commit(open_)


async def test_a_reset_rolls_back_all_that_is_open_or_invalid_and_ids_go_on():
    async with serving() as world:
        done, open_, long, gone = [await world.new() for _ in range(2)] + [
            await world.new(type=TransactionType.LONG),
            await world.new(),
        ]
        for each in (done, open_, long, gone):
            world.topics.put(each)
        await world.service.prepare(done, [b"k"])
        await world.service.commit(done)
        await world.service.invalidate(gone)
        await world.service.reset()
        assert {pointer for _, pointer in world.topics.rolled_back} == {open_, long, gone}
        assert (world.service.figures().open, world.service.invalids()) == (0, ())
        tx = (await world.service.begin()).transaction
        assert tx.transaction_id > gone
        assert tx.read_pointer >= done, "what was committed before stays visible"
        assert world.verdict(done) == "deliver"


async def test_pruning_says_what_an_operator_needs():
    async with serving(max_lifetime_ms=1_000) as world:
        one, open_ = await world.new(), await world.new()
        world.topics.put(one)
        world.topics.put(open_, OTHER)
        await world.service.invalidate(one)
        figures = world.service.pruning()
        assert (figures.invalid, figures.oldest_invalid, figures.safe_bound) == (1, one, None)
        assert figures.oldest_by_topic == {TOPIC: one, OTHER: open_}
        world.clock.ms += 1_000
        assert await world.service.complete(world.service.begin_pass()) == 1
        figures = world.service.pruning()
        assert (figures.invalid, figures.safe_bound, figures.last_pass_ms) == (0, one, world.clock.ms)
        assert figures.kept_because is None


# --- looking -----------------------------------------------------------------------------------------


async def test_who_holds_readers_up_is_named_with_topics_and_hidden_messages():
    async with serving() as world:
        one = await world.new(client_id="batch")
        world.topics.put(one, TOPIC)
        world.topics.put(one, OTHER)
        status = await world.service.look(one)
        assert (status.client_id, status.topics, status.hidden_messages) == ("batch", (TOPIC, OTHER), 7)
        assert (await world.service.listed())[0] == status
        world.topics.failing[OTHER] = TopicNotFound("gone")
        assert (await world.service.look(one)).hidden_messages is None


async def test_the_begin_is_what_tephras_clients_decode():
    async with serving() as world:
        await world.new()
        tx = (await world.service.begin(client_id="x")).transaction
        assert decode_transaction(encode_transaction(tx)) == tx


# --- leaving -----------------------------------------------------------------------------------------


async def test_what_was_asked_is_served_before_it_leaves_and_later_calls_are_told(results):
    async with serving() as world:
        one = await world.new()
        world.store.stall("write")
        answer = results(world.service.commit, one)
        await settle()
        world.service.close()
        later = results(world.service.begin)
        await settle()
        assert isinstance(later[0], ShuttingDown)
        world.store.release("write")
        await settle()
        assert answer[0].state == "committed"


async def test_too_many_requests_are_refused_and_did_not_happen(results):
    async with serving(mailbox_requests=1) as world:
        one = await world.new()
        world.store.stall("write")
        results(world.service.begin)
        await settle()
        results(world.service.begin)
        await settle()
        with pytest.raises(Overloaded):
            await world.service.commit(one)
        world.store.release("write")
        await settle()
        with pytest.raises(TransactionNotFound):
            await world.service.commit(one + 10)
