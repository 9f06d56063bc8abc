"""The transaction service: durable before it answers, reloaded after a crash, with aborts that roll back first."""

from __future__ import annotations

from contextlib import AsyncExitStack

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
from plainsong.protocol.tephra.state import decode_transaction, encode_transaction
from plainsong.protocol.transactions.asks import Begin
from plainsong.protocol.transactions.ledger import LEAST_TEPHRA_POINTERS
from plainsong.protocol.transactions.transaction import TransactionType
from storage.leveldb.store import LevelDBStore
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore


async def caught(call, *args):
    """Return a call's result or its error."""
    try:
        return await call(*args)
    except PlainsongError as error:
        return error


@pytest.fixture
def results(nursery):
    """Return a function that starts a call and returns a list, to which the outcome is added once there is one."""

    def start(call, *args):
        found = []

        async def run():
            found.append(await caught(call, *args))

        nursery.start_soon(run)
        return found

    return start


# --- durable before it answers ---------------------------------------------------------------------


async def test_nothing_is_answered_or_visible_before_it_is_durable(results):
    async with serving() as harness:
        one = await harness.new()
        harness.store.stall("write")
        answer = results(harness.service.commit, one)
        await settle()
        assert (answer, harness.verdict(one), harness.service.standing(one)) == ([], "hold", "deciding")
        harness.store.release("write")
        await settle()
        assert answer[0].state == "committed"
        assert harness.verdict(one) == "deliver"


async def test_a_begin_is_durable_before_its_pointer_is_known(results):
    async with serving() as harness:
        harness.store.stall("write")
        answer = results(harness.service.begin)
        await settle()
        assert not answer
        harness.store.crash()
        await settle()
        assert isinstance(answer[0], OutcomeUnknown)


async def test_requests_that_arrive_during_a_commit_share_the_next_one(results):
    async with serving() as harness:
        writes, write = [], harness.store.write

        async def counted(commit, **more):
            writes.append(commit)
            await write(commit, **more)

        harness.store.write = counted
        harness.store.stall("write")
        answers = [results(harness.service.begin)]
        await settle()
        answers += [results(harness.service.begin) for _ in range(19)]
        await settle()
        harness.store.release("write")
        await settle()
        assert len({answer[0].transaction.transaction_id for answer in answers}) == 20
        assert len(writes) == 2


async def test_reads_return_only_durable_state(results):
    async with serving() as harness:
        one = await harness.new()
        harness.store.stall("write")
        results(harness.service.invalidate, one)
        await settle()
        status = results(harness.service.look, one)
        await settle()
        assert not status
        assert harness.service.begin_pass().invalids == ()
        assert harness.service.state().invalids == ()
        harness.store.release("write")
        await settle()
        assert status[0].state == "invalid"
        assert harness.service.begin_pass().invalids == (one,)


# --- failures of the store ---------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True])
async def test_a_commit_that_meets_a_failure_is_unknown_and_can_be_queried(applied):
    async with serving() as harness:
        one = await harness.new()
        loaded = harness.loaded
        harness.store.fail_next("write", applied=10 if applied else 0)
        with pytest.raises(OutcomeUnknown):
            await harness.service.commit(one)
        await loaded.wait()
        assert (await harness.service.look(one)).state == ("committed" if applied else "in_progress")
        assert (await harness.service.commit(one)).changed is not applied
        assert harness.counts.falls == 1


async def test_every_call_and_every_pointer_lookup_reports_that_the_service_is_down(results):
    async with serving() as harness:
        one = await harness.new()
        harness.store.stall("claim")
        harness.store.fail_next("write")
        with pytest.raises(OutcomeUnknown):
            await harness.service.commit(one)
        await settle()
        service = harness.service
        for call in (service.view, service.figures, service.begin_pass, service.state, service.pruning):
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
        harness.store.release("claim")
        await settle()
        assert (await service.commit(one)).state == "committed"


async def test_requests_are_refused_before_the_first_load():
    async with serving() as harness:
        other = type(harness)(FaultyStore(MemoryStore()), SetClock())
        with pytest.raises(TransactionsUnavailable):
            await other.service.begin()


async def test_loading_is_retried_until_it_succeeds(autojump_clock):
    async with serving() as harness:
        one = await harness.new()
        harness.store.fail_next("write")
        for _ in range(3):
            harness.store.fail_next("scan")
        loaded = harness.loaded
        await caught(harness.service.commit, one)
        await loaded.wait()
        assert harness.counts.falls == 4
        assert (await harness.service.commit(one)).state == "committed"


@pytest.mark.parametrize("rows", range(5))
async def test_a_power_cut_at_any_row_of_a_commit_leaves_it_open_or_committed(rows, results):
    async with serving() as harness:
        one, two = await harness.new(), await harness.new()
        await harness.service.prepare(one, [b"k"])
        await harness.service.prepare(two, [b"k"])
        loaded = harness.loaded
        harness.store.stall("write")
        answer = results(harness.service.commit, one)
        await settle()
        harness.store.crash(keep_rows=rows)
        await loaded.wait()
        assert isinstance(answer[0], OutcomeUnknown)
        state = (await harness.service.look(one)).state
        assert state == ("committed" if rows >= 3 else "in_progress")
        assert harness.verdict(one) == ("deliver" if rows >= 3 else "hold")
        await harness.service.commit(one)
        with pytest.raises(TransactionConflict):
            await harness.service.commit(two)
        assert harness.counts.conflicts == 1


async def test_ids_and_decisions_survive_on_leveldb_although_the_clock_went_back(tmp_path):
    clock = SetClock()
    async with await LevelDBStore.open(tmp_path) as store, serving(store, clock) as harness:
        done, gone, open_, long = [await harness.new() for _ in range(3)] + [
            await harness.new(type=TransactionType.LONG)
        ]
        await harness.service.prepare(done, [b"k"])
        await harness.service.commit(done)
        await harness.service.invalidate(gone)
        last = (await harness.service.checkpoint(long)).transaction.write_pointer
    clock.ms -= 3_600_000
    async with await LevelDBStore.open(tmp_path) as store, serving(store, clock) as harness:
        assert [(await harness.service.look(each)).state for each in (done, gone, open_, long)] == [
            "committed",
            "invalid",
            "in_progress",
            "in_progress",
        ]
        assert [harness.verdict(each) for each in (done, gone, open_, last)] == ["deliver", "skip", "hold", "hold"]
        assert await harness.new() > last
        with pytest.raises(TransactionConflict):
            await harness.service.prepare(open_, [b"k"])


async def test_a_failed_write_makes_the_begins_of_tephras_clients_invalid_that_it_loses(tmp_path, caplog):
    async with AsyncExitStack() as stack:
        disk = await stack.enter_async_context(await LevelDBStore.open(tmp_path))
        faulty = FaultyStore(disk)
        faulty.traits = disk.traits  # the write that fails here leaves nothing
        harness = await stack.enter_async_context(serving(faulty))

        async def new():
            return (await harness.service.ask(Begin(tephra=True))).transaction.transaction_id

        await harness.service.commit(await new())
        loaded = harness.loaded
        harness.store.fail_next("write")
        lost, other = await new(), await new()
        await caught(harness.service.commit, other)
        await loaded.wait()
        assert [(await harness.service.look(each)).state for each in (lost, other)] == ["invalid", "invalid"]
        assert [harness.verdict(each) for each in (lost, other)] == ["skip", "skip"]
        (warning,) = [each for each in caplog.records if each.message == "begins of Tephra's clients lost"]
        assert (warning.lost, warning.invalid) == (LEAST_TEPHRA_POINTERS, LEAST_TEPHRA_POINTERS)
        await harness.service.abort(lost)
        assert (await new()) > other
    async with await LevelDBStore.open(tmp_path) as disk, serving(disk) as harness:
        assert [(await harness.service.look(each)).state for each in (lost, other)] == ["aborted", "invalid"]


async def test_a_long_invalid_list_makes_starts_of_tephras_clients_wait_for_the_disk_and_is_logged_once(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("plainsong.protocol.transactions.ledger.MANY_INVALID", 3)
    monkeypatch.setattr("actors.transaction_actor.MANY_INVALID", 3)
    caplog.set_level("INFO", "actors.transaction_actor")

    def logged():
        return [(each.levelname, each.invalid, each.bound) for each in caplog.records if "for the disk" in each.message]

    async with await LevelDBStore.open(tmp_path) as disk, serving(disk) as harness:
        invalid = [(await harness.service.ask(Begin(tephra=True))).transaction.transaction_id for _ in range(4)]
        for pointer in invalid[:2]:
            await harness.service.invalidate(pointer)
        assert logged() == []
        for pointer in invalid[2:]:
            await harness.service.invalidate(pointer)
        assert logged() == [("WARNING", 3, 3)]
        ledger = harness.service.actor.core.ledger
        assert ledger.head.tephra == 0
        await harness.service.ask(Begin(tephra=True))
        assert not ledger.unwritten
        await harness.service.abort(invalid[0])
        assert len(logged()) == 1
        await harness.service.abort(invalid[1])
        assert logged() == [("WARNING", 3, 3), ("INFO", 2, 3)]
        assert ledger.head.tephra > 0


# --- deadlines ---------------------------------------------------------------------------------------


async def test_a_timeout_takes_effect_by_itself_is_durable_and_wakes_waiters(autojump_clock, results):
    async with serving() as harness:
        one = await harness.new(timeout_s=5)
        woken = results(harness.index.wait, one)
        await trio.sleep(4.9)
        assert (woken, harness.verdict(one)) == ([], "hold")
        await trio.sleep(0.2)
        assert woken
        assert (harness.verdict(one), harness.counts.decisions, harness.counts.time_outs) == ("skip", ["invalid"], 1)
        with pytest.raises(TransactionNotInProgress):
            await harness.service.commit(one)


async def test_a_commit_or_abort_wakes_its_waiters(results):
    async with serving() as harness:
        one, two = await harness.new(), await harness.new()
        woken = [results(harness.index.wait, each) for each in (one, two)]
        await settle()
        await harness.service.commit(one)
        await settle()
        assert [bool(each) for each in woken] == [True, False]
        await harness.service.abort(two)
        await settle()
        assert woken[1]


# --- commits and writes in progress ------------------------------------------------------------------


async def test_a_commit_waits_for_writes_in_progress_and_admits_no_more(results):
    async with serving() as harness:
        one, written = await harness.new(), trio.Event()
        publish = results(harness.topics.publish, harness.service, one, written)
        await settle()
        commits = [results(harness.service.commit, one) for _ in range(2)]
        await settle()
        assert commits == [[], []]
        late = await caught(harness.topics.publish, harness.service, one, written)
        assert isinstance(late, TransactionNotInProgress)
        assert isinstance(await caught(harness.service.abort, one), TransactionNotInProgress)
        written.set()
        await settle()
        assert publish == [None]
        assert sorted(each[0].changed for each in commits) == [False, True]
        assert harness.index.take_decided(TOPIC) == [one]


async def test_others_are_served_while_a_commit_waits(results):
    async with serving() as harness:
        one, written = await harness.new(), trio.Event()
        results(harness.topics.publish, harness.service, one, written)
        await settle()
        commit = results(harness.service.commit, one)
        two = await harness.new()
        assert (await harness.service.commit(two)).changed
        assert not commit
        written.set()


async def test_a_commit_that_waits_when_the_service_crashes_has_not_happened(results):
    async with serving() as harness:
        one, two, written = await harness.new(), await harness.new(), trio.Event()
        results(harness.topics.publish, harness.service, one, written)
        await settle()
        commit = results(harness.service.commit, one)
        await settle()
        loaded = harness.loaded
        harness.store.fail_next("write")
        await caught(harness.service.commit, two)
        await loaded.wait()
        assert isinstance(commit[0], TransactionsUnavailable)
        assert harness.service.standing(one) == "in_progress"
        written.set()
        await settle()
        assert (await harness.service.commit(one)).changed


# --- aborts go to the topics first -------------------------------------------------------------------


async def test_an_abort_rolls_back_everywhere_before_it_is_answered(results):
    async with serving() as harness:
        one = await harness.new()
        two = (await harness.service.checkpoint(one)).transaction.write_pointer
        harness.topics.put(one, TOPIC)
        harness.topics.put(two, OTHER)
        harness.topics.stuck[OTHER] = trio.Event()
        answers = [results(harness.service.abort, one) for _ in range(2)]
        await settle()
        assert answers == [[], []]
        assert harness.service.standing(one) == "invalid"
        harness.topics.stuck[OTHER].set()
        await settle()
        assert [each[0].state for each in answers] == ["aborted", "aborted"]
        assert harness.topics.rolled_back == {(TOPIC, one), (OTHER, two)}
        assert harness.index.take_decided(OTHER) == [two]


async def test_an_abort_also_rolls_back_writes_in_progress(results):
    async with serving() as harness:
        one, written = await harness.new(), trio.Event()
        results(harness.topics.publish, harness.service, one, written)
        await settle()
        abort = results(harness.service.abort, one)
        await settle()
        assert harness.topics.rolled_back == {(TOPIC, one)}
        assert abort[0].state == "aborted"
        written.set()


@pytest.mark.parametrize("error", [TopicNotFound("gone"), Recovering("later")])
async def test_an_abort_that_cannot_reach_a_topic_becomes_an_invalidation_and_reports_it(error, autojump_clock):
    async with serving() as harness:
        one = await harness.new()
        harness.topics.put(one, TOPIC)
        harness.topics.put(one, OTHER)
        harness.topics.failing[OTHER] = error
        assert (await harness.service.abort(one)).state == "invalid"
        assert (TOPIC, one) in harness.topics.rolled_back
        assert harness.verdict(one) == "skip"
        del harness.topics.failing[OTHER]
        assert (await harness.service.abort(one)).state == "aborted"
        assert harness.service.invalids() == ()


async def test_a_temporarily_unavailable_topic_is_asked_again(autojump_clock):
    async with serving() as harness:
        one = await harness.new()
        harness.topics.put(one)
        harness.topics.failing[TOPIC] = Overloaded("too much")

        async def recover():
            await trio.sleep(1)
            del harness.topics.failing[TOPIC]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(recover)
            assert (await harness.service.abort(one)).state == "aborted"


async def test_an_abort_completes_although_the_caller_left(results):
    async with serving() as harness:
        one = await harness.new()
        harness.topics.put(one)
        harness.topics.stuck[TOPIC] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.service.abort, one)
            await settle()
            nursery.cancel_scope.cancel()
        harness.topics.stuck[TOPIC].set()
        await settle()
        assert (await harness.service.look(one)).state == "aborted"


async def test_an_abort_interrupted_by_a_crash_continues_after_the_start():
    store = FaultyStore(MemoryStore())
    async with serving(store) as harness:
        one = await harness.new()
        harness.topics.put(one)
        harness.topics.stuck[TOPIC] = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caught, harness.service.abort, one)
            await settle()
            with pytest.raises(TransactionNotInProgress):
                await harness.service.commit(one)
            harness.service.close()
    async with serving(store, rows=[one]) as harness:
        await settle()
        assert (await harness.service.look(one)).state == "aborted"
        assert harness.topics.rolled_back == {(TOPIC, one)}


async def test_an_abort_in_progress_when_the_service_crashes_is_unknown_and_continues(results):
    async with serving() as harness:
        one, two = await harness.new(), await harness.new()
        harness.topics.put(one)
        harness.topics.stuck[TOPIC] = trio.Event()
        abort = results(harness.service.abort, one)
        await settle()
        loaded = harness.loaded
        harness.store.fail_next("write")
        await caught(harness.service.commit, two)
        await loaded.wait()
        assert isinstance(abort[0], OutcomeUnknown)
        assert harness.service.standing(one) == "invalid"
        harness.topics.stuck[TOPIC].set()
        await settle()
        assert (await harness.service.look(one)).state == "aborted"


async def test_a_transaction_that_times_out_during_its_abort_ends_aborted(autojump_clock, results):
    async with serving() as harness:
        one = await harness.new(timeout_s=1)
        harness.topics.put(one)
        harness.topics.stuck[TOPIC] = trio.Event()
        abort = results(harness.service.abort, one)
        await trio.sleep(2)
        assert harness.service.invalids() == (one,)
        harness.topics.stuck[TOPIC].set()
        await trio.sleep(1)
        assert abort[0].state == "aborted"
        assert harness.service.invalids() == ()


async def test_aborting_a_long_transaction_rolls_back_and_leaves_it_invalid():
    async with serving() as harness:
        one = await harness.new(type=TransactionType.LONG)
        harness.topics.put(one)
        assert (await harness.service.abort(one)).state == "invalid"
        assert harness.topics.rolled_back == {(TOPIC, one)}


# --- the invalid list --------------------------------------------------------------------------------


async def test_truncation_first_rolls_back_remaining_rows_and_keeps_pointers_it_cannot_reach(autojump_clock):
    async with serving() as harness:
        one, two, open_ = await harness.new(), await harness.new(), await harness.new()
        for each in (one, two, open_):
            harness.topics.put(each, OTHER if each == two else TOPIC)
        await harness.service.invalidate(one)
        await harness.service.invalidate(two)
        harness.topics.failing[OTHER] = Recovering("later")
        assert await harness.service.truncate([one, two, open_]) == 1
        assert harness.topics.rolled_back == {(TOPIC, one)}
        assert harness.service.invalids() == (two,)
        assert harness.service.standing(open_) == "in_progress"


async def test_truncation_before_a_time_is_refused_if_something_in_progress_is_older():
    async with serving() as harness:
        one = await harness.new()
        harness.clock.ms += 10
        open_ = await harness.new()
        await harness.service.invalidate(one)
        with pytest.raises(InvalidParameter):
            await harness.service.truncate_before(harness.clock.ms + 1)
        assert await harness.service.truncate_before(harness.clock.ms) == 1
        await harness.service.commit(open_)


async def test_a_reset_rolls_back_everything_open_or_invalid_and_ids_keep_increasing():
    async with serving() as harness:
        done, open_, long, gone = [await harness.new() for _ in range(2)] + [
            await harness.new(type=TransactionType.LONG),
            await harness.new(),
        ]
        for each in (done, open_, long, gone):
            harness.topics.put(each)
        await harness.service.prepare(done, [b"k"])
        await harness.service.commit(done)
        await harness.service.invalidate(gone)
        await harness.service.reset()
        assert {pointer for _, pointer in harness.topics.rolled_back} == {open_, long, gone}
        assert (harness.service.figures().open, harness.service.invalids()) == (0, ())
        tx = (await harness.service.begin()).transaction
        assert tx.transaction_id > gone
        assert tx.read_pointer >= done, "what was committed before stays visible"
        assert harness.verdict(done) == "deliver"


async def test_pruning_figures_contain_what_an_operator_needs():
    async with serving(max_lifetime_ms=1_000) as harness:
        one, open_ = await harness.new(), await harness.new()
        harness.topics.put(one)
        harness.topics.put(open_, OTHER)
        await harness.service.invalidate(one)
        figures = harness.service.pruning()
        assert (figures.invalid, figures.oldest_invalid, figures.safe_bound) == (1, one, None)
        assert figures.oldest_by_topic == {TOPIC: one, OTHER: open_}
        harness.clock.ms += 1_000
        assert await harness.service.complete(harness.service.begin_pass()) == 1
        figures = harness.service.pruning()
        assert (figures.invalid, figures.safe_bound, figures.last_pass_ms) == (0, one, harness.clock.ms)
        assert figures.kept_because is None


# --- reads -------------------------------------------------------------------------------------------


async def test_the_transaction_that_holds_readers_is_named_with_topics_and_hidden_messages():
    async with serving() as harness:
        one = await harness.new(client_id="batch")
        harness.topics.put(one, TOPIC)
        harness.topics.put(one, OTHER)
        status = await harness.service.look(one)
        assert (status.client_id, status.topics, status.hidden_messages) == ("batch", (TOPIC, OTHER), 14)
        assert (await harness.service.listed())[0] == status
        harness.topics.failing[OTHER] = TopicNotFound("gone")
        assert (await harness.service.look(one)).hidden_messages is None


async def test_the_answer_to_begin_is_what_the_tephra_client_decodes():
    async with serving() as harness:
        await harness.new()
        tx = (await harness.service.begin(client_id="x")).transaction
        assert decode_transaction(encode_transaction(tx)) == tx


# --- closing -----------------------------------------------------------------------------------------


async def test_pending_calls_are_served_before_the_stop_and_later_ones_refused(results):
    async with serving() as harness:
        one = await harness.new()
        harness.store.stall("write")
        answer = results(harness.service.commit, one)
        await settle()
        harness.service.close()
        later = results(harness.service.begin)
        await settle()
        assert isinstance(later[0], ShuttingDown)
        harness.store.release("write")
        await settle()
        assert answer[0].state == "committed"


async def test_too_many_requests_are_refused_and_did_not_happen(results):
    async with serving(mailbox_requests=1) as harness:
        one = await harness.new()
        harness.store.stall("write")
        results(harness.service.begin)
        await settle()
        results(harness.service.begin)
        await settle()
        with pytest.raises(Overloaded):
            await harness.service.commit(one)
        harness.store.release("write")
        await settle()
        with pytest.raises(TransactionNotFound):
            await harness.service.commit(one + 10)
