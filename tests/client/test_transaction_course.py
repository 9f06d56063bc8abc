"""Every step of a transaction fails in every participant in every way: the subsequent calls, and the decision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from service import Service, then_lost

from plainsong.errors import (
    CommittedWithErrors,
    ConnectFailed,
    NoTransaction,
    TransactionFailed,
    TransactionInDoubt,
    TransactionInProgress,
    TransactionTimedOut,
)
from plainsong.protocol.errors import (
    PlainsongError,
    TopicNotFound,
    TransactionConflict,
    TransactionNotInProgress,
    TransactionTooLarge,
)
from tests.client.simulation import LOST, NO_DAEMON, Simulation, kind, problem

pytestmark = pytest.mark.usefixtures("both_clients")

NAMES = ("a", "b", "c")


class Boom(Exception):
    """Raised by a participant."""


class Participant:
    """Records its calls; ``fails``: by method, an exception to raise or a value to return."""

    def __init__(self, name: str, events: list[str], fails: dict[str, Any] | None = None) -> None:
        self._name = name
        self._events = events
        self._fails = fails or {}
        self.seen: list[Any] = []

    @property
    def name(self) -> str:
        if "name" in self._fails:
            raise Boom("no name")
        return self._name

    def _asked(self, method: str, result: Any = None) -> Any:
        self._events.append(f"{self._name}.{method}")
        if method not in self._fails:
            return result
        failure = self._fails[method]
        if isinstance(failure, Exception):
            raise failure
        return failure

    def start_tx(self, transaction: Any) -> None:
        self.seen.append(transaction)
        self._asked("start_tx")

    def update_tx(self, transaction: Any) -> None:
        self.seen.append(transaction)
        self._asked("update_tx")

    def tx_changes(self) -> list[bytes]:
        return self._asked("tx_changes", [self._name.encode()])

    def commit_tx(self) -> bool:
        return self._asked("commit_tx", True)

    def post_tx_commit(self) -> None:
        self._asked("post_tx_commit")

    def rollback_tx(self) -> bool:
        return self._asked("rollback_tx", True)


class AsyncParticipant(Participant):
    async def start_tx(self, transaction: Any) -> None:
        await trio.lowlevel.checkpoint()
        super().start_tx(transaction)

    async def update_tx(self, transaction: Any) -> None:
        super().update_tx(transaction)

    async def tx_changes(self) -> list[bytes]:
        return super().tx_changes()

    async def commit_tx(self) -> bool:
        await trio.lowlevel.checkpoint()
        return super().commit_tx()

    async def post_tx_commit(self) -> None:
        super().post_tx_commit()

    async def rollback_tx(self) -> bool:
        return super().rollback_tx()


class Stage:
    """Consecutive transactions with their service, for the client that the test covers."""

    def __init__(self, fails: dict[str, dict[str, Any]], *, retry: bool = False) -> None:
        self.events: list[str] = []
        self.service = Service(self.events)
        self.simulation = Simulation(self.service.carry)
        made = Participant if kind().name == "sync" else AsyncParticipant
        self.participants = [made(name, self.events, fails.get(name)) for name in NAMES]
        self.channel = self.simulation.channel(retry=retry)
        self.context = self.made(self.participants)
        self.run = self.simulation.run

    def made(self, participants: list[Any]) -> Any:
        return kind().TransactionContext(SimpleNamespace(_channel=self.channel), participants)

    def caught(self, work: Any, *arguments: Any) -> PlainsongError | None:
        try:
            self.run(work, *arguments)
        except PlainsongError as error:
            return error
        return None

    def started(self) -> Any:
        transaction = self.run(self.context.start)
        self.events.clear()
        return transaction


def each(method: str, names: tuple[str, ...] = NAMES) -> list[str]:
    return [f"{name}.{method}" for name in names]


def upto(name: str) -> tuple[str, ...]:
    return NAMES[: NAMES.index(name) + 1]


FAILURES = [Boom("boom"), False, None, 1]
WAYS = ["raises", "False", "None", "1"]


# --- success -------------------------------------------------------------------------------------


def test_a_transaction_calls_all_participants_in_order_and_the_service_in_between():
    stage = Stage({})
    transaction = stage.run(stage.context.start)
    assert stage.events == ["service.begin", *each("start_tx")]
    assert [participant.seen for participant in stage.participants] == [[transaction]] * 3
    stage.events.clear()
    stage.run(stage.context.finish)
    assert stage.events == [
        *each("tx_changes"),
        "service.prepare",
        *each("commit_tx"),
        "service.commit",
        *each("post_tx_commit"),
    ]
    assert stage.service.changes[transaction.id] == [b"a", b"b", b"c"]
    assert stage.context.state == "committed"
    assert stage.context.state != "in_progress"


def test_without_changes_conflicts_are_not_checked():
    stage = Stage({name: {"tx_changes": []} for name in NAMES})
    stage.started()
    stage.run(stage.context.finish)
    assert "service.prepare" not in stage.events


def test_a_transaction_object_can_be_used_again():
    stage = Stage({})
    first = stage.started()
    stage.run(stage.context.finish)
    second = stage.started()
    stage.run(stage.context.finish)
    assert second.id > first.id


# --- start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_start_that_fails_aborts_without_rolling_back(name: str):
    stage = Stage({name: {"start_tx": Boom("boom")}})
    error = stage.caught(stage.context.start)
    assert type(error) is TransactionFailed
    assert isinstance(error.__cause__, Boom)
    assert f"starting {name}" in error.detail
    assert stage.events == ["service.begin", *each("start_tx", upto(name)), "service.abort"]
    assert stage.context.state != "in_progress"


def test_participants_that_had_started_are_released_when_a_later_one_could_not():
    stage = Stage({NAMES[-1]: {"start_tx": Boom("boom")}})
    let_go: list[str] = []
    for participant in stage.participants:
        participant.abandon_tx = lambda name=participant.name: let_go.append(name)
    assert isinstance(stage.caught(stage.context.start), TransactionFailed)
    assert let_go == list(NAMES[:-1])


def test_an_abort_that_fails_after_a_failed_start_is_raised():
    stage = Stage({"b": {"start_tx": Boom("boom")}})
    stage.service.instead["abort"] = [NO_DAEMON]
    error = stage.caught(stage.context.start)
    assert isinstance(error, ConnectFailed)
    assert isinstance(error.__cause__, Boom)


@pytest.mark.parametrize(("answer", "cls"), [(NO_DAEMON, ConnectFailed), (problem(503, "overloaded"), PlainsongError)])
def test_a_failed_begin_is_raised_unchanged(answer: Any, cls: type[Exception]):
    stage = Stage({})
    stage.service.instead["begin"] = [answer]
    assert isinstance(stage.caught(stage.context.start), cls)
    assert stage.events == ["service.begin"]


def test_a_transaction_cannot_be_started_inside_another():
    stage = Stage({})
    stage.started()
    assert isinstance(stage.caught(stage.context.start), TransactionInProgress)
    assert not stage.events


@pytest.mark.parametrize("step", ["finish", "checkpoint"])
def test_steps_without_a_transaction_are_refused(step: str):
    stage = Stage({})
    assert isinstance(stage.caught(getattr(stage.context, step)), NoTransaction)
    assert stage.run(stage.context.abort) is None
    assert not stage.events


# --- finish --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changes", [Boom("boom"), b"no collection", ["no bytes"], None])
def test_changes_that_cannot_be_collected_abort(name: str, changes: Any):
    stage = Stage({name: {"tx_changes": changes}})
    stage.started()
    error = stage.caught(stage.context.finish)
    assert type(error) is TransactionFailed
    assert error.__cause__ is not None
    assert stage.events == [*each("tx_changes", upto(name)), *each("rollback_tx"), "service.abort"]
    assert stage.context.state == "aborted"


@pytest.mark.parametrize(
    ("answer", "cls"),
    [
        (problem(409, "transaction_conflict"), TransactionConflict),
        (problem(413, "transaction_too_large"), TransactionTooLarge),
        (problem(409, "transaction_not_in_progress"), TransactionNotInProgress),
        (problem(500, "internal", "unknown"), TransactionFailed),
        (NO_DAEMON, ConnectFailed),
        (LOST, TransactionFailed),
    ],
)
def test_a_failing_prepare_aborts_and_is_raised_by_its_class(answer: Any, cls: type[PlainsongError]):
    stage = Stage({})
    stage.started()
    stage.service.instead["prepare"] = [answer]
    error = stage.caught(stage.context.finish)
    assert type(error) is cls
    assert error.outcome == "not-applied"
    assert stage.events == [*each("tx_changes"), "service.prepare", *each("rollback_tx"), "service.abort"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("failure", FAILURES, ids=WAYS)
def test_a_participant_that_cannot_persist_aborts_and_later_ones_are_not_asked(name: str, failure: Any):
    stage = Stage({name: {"commit_tx": failure}})
    stage.started()
    error = stage.caught(stage.context.finish)
    assert type(error) is TransactionFailed
    assert isinstance(error.__cause__, Boom) is isinstance(failure, Boom)
    assert name in error.detail
    assert stage.events == [
        *each("tx_changes"),
        "service.prepare",
        *each("commit_tx", upto(name)),
        *each("rollback_tx"),
        "service.abort",
    ]
    assert "the transaction was undone" in error.__notes__


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("failure", FAILURES, ids=WAYS)
def test_a_participant_that_cannot_roll_back_makes_it_invalid_and_the_others_are_rolled_back(name: str, failure: Any):
    stage = Stage({"a": {"commit_tx": Boom("first")}})
    stage.participants[NAMES.index(name)]._fails["rollback_tx"] = failure
    stage.started()
    error = stage.caught(stage.context.finish)
    assert isinstance(error.__cause__, Boom)
    assert str(error.__cause__) == "first"
    assert stage.events[-4:] == [*each("rollback_tx"), "service.invalidate"]
    assert stage.context.state == "invalid"
    assert any(f"{name}" in note for note in error.__notes__)
    assert list(error.others) == ([failure] if isinstance(failure, Exception) else [])


def test_all_failures_during_a_rollback_are_reported_in_order():
    stage = Stage({"a": {"rollback_tx": Boom("one")}, "b": {"commit_tx": False}, "c": {"rollback_tx": Boom("two")}})
    stage.started()
    stage.service.instead["invalidate"] = [NO_DAEMON]
    error = stage.caught(stage.context.finish)
    assert [str(each) for each in error.others][:2] == ["one", "two"]
    assert isinstance(error.others[2], ConnectFailed)
    assert stage.context.state != "in_progress"


@pytest.mark.parametrize(
    ("answer", "cls"),
    [
        (problem(409, "transaction_not_in_progress"), TransactionNotInProgress),
        (problem(409, "transaction_conflict"), TransactionConflict),
        (NO_DAEMON, ConnectFailed),
        (problem(404, "transaction_not_found"), PlainsongError),
    ],
)
def test_a_refused_commit_rolls_back_persisted_participants(answer: Any, cls: type[Exception]):
    stage = Stage({})
    stage.started()
    stage.service.instead["commit"] = [answer]
    error = stage.caught(stage.context.finish)
    assert isinstance(error, cls)
    assert stage.events[-5:] == ["service.commit", *each("rollback_tx"), "service.abort"]


@pytest.mark.parametrize("failing", [("a",), ("b",), ("c",), ("a", "c"), NAMES])
def test_failures_after_the_commit_leave_it_committed_and_every_participant_is_notified(failing: tuple[str, ...]):
    stage = Stage({name: {"post_tx_commit": Boom(name)} for name in failing})
    transaction = stage.started()
    error = stage.caught(stage.context.finish)
    assert type(error) is CommittedWithErrors
    assert error.outcome == "applied"
    assert str(error.__cause__) == failing[0]
    assert [str(other) for other in error.others] == list(failing[1:])
    assert stage.events[-3:] == each("post_tx_commit")
    assert stage.service.states[transaction.id] == "committed"
    assert stage.context.state == "committed"


# --- a lost answer to a commit -------------------------------------------------------------------


def test_a_lost_answer_to_a_commit_is_queried_and_nothing_is_rolled_back():
    stage = Stage({})
    stage.started()
    stage.service.instead["commit"] = [then_lost]
    stage.run(stage.context.finish)
    assert stage.events[-5:] == ["service.commit", "service.get", *each("post_tx_commit")]
    assert stage.context.state == "committed"


def test_a_lost_commit_is_fenced_before_it_is_rolled_back():
    stage = Stage({})
    transaction = stage.started()
    stage.service.instead["commit"] = [LOST]
    error = stage.caught(stage.context.finish)
    assert type(error) is TransactionFailed
    assert error.outcome == "not-applied"
    assert stage.events[-7:] == [
        "service.commit",
        "service.get",
        "service.invalidate",
        *each("rollback_tx"),
        "service.abort",
    ]
    assert stage.service.states[transaction.id] == "aborted"


def test_a_commit_that_overtakes_the_fence_is_found():
    stage = Stage({})
    transaction = stage.started()

    def late(happen: Any) -> Any:
        stage.service.states[transaction.id] = "committed"
        return happen()

    stage.service.instead["commit"] = [LOST]
    stage.service.instead["invalidate"] = [late]
    stage.run(stage.context.finish)
    assert stage.events[-6:] == ["service.get", "service.invalidate", "service.get", *each("post_tx_commit")]


@pytest.mark.parametrize("asked", [NO_DAEMON, LOST, problem(503, "transactions_unavailable")])
def test_a_commit_is_in_doubt_only_if_nothing_knows_its_outcome_and_is_then_not_rolled_back(asked: Any):
    stage = Stage({})
    transaction = stage.started()
    stage.service.instead["commit"] = [then_lost]
    stage.service.instead["get"] = [asked]
    error = stage.caught(stage.context.finish)
    assert type(error) is TransactionInDoubt
    assert error.outcome == "unknown"
    assert error.transaction_id == transaction.id
    assert stage.events[-2:] == ["service.commit", "service.get"]
    assert stage.context.state == "unknown"


def test_a_forgotten_outcome_leaves_the_commit_in_doubt():
    stage = Stage({})
    transaction = stage.started()

    def forgotten(_: Any) -> Any:
        del stage.service.states[transaction.id]
        return LOST

    stage.service.instead["commit"] = [forgotten]
    assert type(stage.caught(stage.context.finish)) is TransactionInDoubt


@pytest.mark.parametrize("verb", ["prepare", "publish", "commit", "checkpoint", "abort"])
def test_a_transaction_waits_for_a_service_that_is_being_reloaded(verb: str):
    stage = Stage({}, retry=True)
    transaction = stage.started()
    stage.run(stage.context.publish, "t", b"m")
    stage.service.instead[verb] = [problem(503, "transactions_unavailable")] * 3
    if verb == "abort":
        assert stage.run(stage.context.abort) == "aborted"
        return
    stage.run(stage.context.checkpoint)
    stage.run(stage.context.finish)
    assert stage.service.states[transaction.id] == "committed"


# --- abort ---------------------------------------------------------------------------------------


def test_an_abort_rolls_back_every_participant():
    stage = Stage({})
    stage.started()
    assert stage.run(stage.context.abort) == "aborted"
    assert stage.events == [*each("rollback_tx"), "service.abort"]


@pytest.mark.parametrize("name", NAMES)
def test_an_incomplete_abort_is_reported_as_invalid(name: str):
    stage = Stage({name: {"rollback_tx": False}})
    stage.started()
    assert stage.run(stage.context.abort) == "invalid"
    assert stage.events == [*each("rollback_tx"), "service.invalidate"]


def test_an_abort_with_a_cause_adds_the_failures_to_it_and_raises_nothing():
    stage = Stage({"b": {"rollback_tx": Boom("late")}})
    stage.started()
    cause = ValueError("mine")
    assert stage.run(stage.context.abort, cause) == "invalid"
    assert any("late" in note for note in cause.__notes__)


def test_an_abort_without_a_cause_raises_the_first_failure():
    stage = Stage({"a": {"rollback_tx": Boom("one")}, "c": {"rollback_tx": Boom("two")}})
    stage.started()
    error = stage.caught(stage.context.abort)
    assert type(error) is TransactionFailed
    assert str(error.__cause__) == "one"
    assert [str(other) for other in error.others] == ["two"]


def test_a_rollback_that_returns_false_is_reported_too():
    stage = Stage({"a": {"rollback_tx": False}, "b": {"rollback_tx": Boom("one")}})
    stage.started()
    error = stage.caught(stage.context.abort)
    assert str(error.__cause__) == "one"
    assert len(error.__notes__) == 2
    assert "a did not roll back" in error.__notes__[1]


# --- checkpoint ----------------------------------------------------------------------------------


def test_a_checkpoint_persists_and_continues_under_another_pointer():
    stage = Stage({})
    first = stage.started()
    second = stage.run(stage.context.checkpoint)
    assert stage.events == [*each("commit_tx"), "service.checkpoint", *each("update_tx")]
    assert (second.id, second.pointers) == (first.id, (first.id, second.write_pointer))
    assert [participant.seen for participant in stage.participants] == [[first, second]] * 3
    stage.run(stage.context.finish)
    assert stage.context.state == "committed"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("failure", FAILURES, ids=WAYS)
def test_a_checkpoint_that_cannot_persist_aborts(name: str, failure: Any):
    stage = Stage({name: {"commit_tx": failure}})
    stage.started()
    assert type(stage.caught(stage.context.checkpoint)) is TransactionFailed
    assert stage.events == [*each("commit_tx", upto(name)), *each("rollback_tx"), "service.abort"]
    assert stage.context.state != "in_progress"


@pytest.mark.parametrize("answer", [NO_DAEMON, LOST, problem(409, "transaction_not_in_progress")])
def test_a_checkpoint_that_the_service_does_not_make_aborts(answer: Any):
    stage = Stage({})
    stage.started()
    stage.service.instead["checkpoint"] = [answer]
    assert stage.caught(stage.context.checkpoint) is not None
    assert stage.events == [*each("commit_tx"), "service.checkpoint", *each("rollback_tx"), "service.abort"]


@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_fails_aborts(name: str):
    stage = Stage({name: {"update_tx": Boom("boom")}})
    stage.started()
    assert type(stage.caught(stage.context.checkpoint)) is TransactionFailed
    assert stage.events[3:] == [
        "service.checkpoint",
        *each("update_tx", upto(name)),
        *each("rollback_tx"),
        "service.abort",
    ]


# --- participants --------------------------------------------------------------------------------


def test_a_participant_added_during_the_transaction_is_started_and_called_after_the_others_and_before_the_messages():
    stage = Stage({})
    stage.started()
    late = type(stage.participants[0])("late", stage.events)
    stage.run(stage.context.add, late)
    stage.run(stage.context.add, late)
    assert stage.events == ["late.start_tx"]
    stage.run(stage.context.publish, "t", b"m")
    stage.events.clear()
    stage.run(stage.context.finish)
    persisted = [event for event in stage.events if event.endswith(("commit_tx", "publish")) and "post" not in event]
    assert persisted == [*each("commit_tx"), "late.commit_tx", "service.publish"]


def test_a_participant_that_fails_to_start_during_the_transaction_is_rolled_back_with_the_others():
    stage = Stage({})
    stage.started()
    late = type(stage.participants[0])("late", stage.events, {"start_tx": Boom("boom")})
    with pytest.raises(Boom):
        stage.run(stage.context.add, late)
    stage.run(stage.context.abort)
    assert "late.rollback_tx" in stage.events


def test_no_participant_leaves_during_the_transaction():
    stage = Stage({})
    stage.started()
    with pytest.raises(TransactionInProgress):
        stage.context.remove(stage.participants[0])
    stage.run(stage.context.abort)
    assert stage.context.remove(stage.participants[0])
    assert not stage.context.remove(stage.participants[0])
    stage.started()
    stage.run(stage.context.abort)
    assert not [event for event in stage.events if event.startswith("a.")]


def test_an_invalid_participant_is_refused_by_name():
    stage = Stage({})
    with pytest.raises(PlainsongError, match="object cannot take part in a transaction: it has no start_tx"):
        stage.run(stage.context.add, object())


def test_a_participant_is_called_once_however_often_it_is_added():
    stage = Stage({})
    stage.context = stage.made([*stage.participants, *stage.participants])
    stage.run(stage.context.start)
    assert stage.events == ["service.begin", *each("start_tx")]


def test_an_asynchronous_participant_is_refused_where_it_cannot_be_awaited(both_clients: str):
    if both_clients == "async":
        pytest.skip("it can be awaited there")
    stage = Stage({})
    stage.run(stage.context.add, AsyncParticipant("late", stage.events))
    error = stage.caught(stage.context.start)
    assert type(error) is TransactionFailed
    assert "AsyncClient" in error.detail
    assert stage.service.states[stage.service._last] == "aborted"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_raises_has_no_effect(name: str):
    stage = Stage({name: {"name": True, "commit_tx": False}})
    stage.started()
    error = stage.caught(stage.context.finish)
    assert "Participant" in error.detail


# --- messages ------------------------------------------------------------------------------------


def test_a_missing_topic_rolls_back_everything_and_is_raised_by_its_class():
    stage = Stage({})
    stage.started()
    stage.run(stage.context.publish, "there", b"m")
    stage.run(stage.context.publish, "missing", b"m")
    assert type(stage.caught(stage.context.finish)) is TopicNotFound
    assert stage.events[-6:] == [*each("rollback_tx"), "service.rollback", "service.rollback", "service.abort"]
    assert not stage.service.published


def test_an_unanswered_publish_is_rolled_back_and_the_transaction_made_invalid():
    stage = Stage({})
    transaction = stage.started()
    stage.run(stage.context.publish, "t", b"m")
    stage.service.instead["publish"] = [then_lost]
    error = stage.caught(stage.context.finish)
    assert type(error) is TransactionFailed
    assert error.outcome == "not-applied"
    assert stage.service.rolled_back == [("t", transaction.id)]
    assert stage.service.states[transaction.id] == "invalid"


# --- time ----------------------------------------------------------------------------------------


def test_a_transaction_that_took_too_long_reports_its_age_its_limit_and_the_settings():
    stage = Stage({})
    transaction = stage.started()
    assert transaction.timeout_s == pytest.approx(30, abs=0.001)
    stage.simulation.now_s = 31.25
    stage.service.states[transaction.id] = "invalid"
    error = stage.caught(stage.context.finish)
    assert type(error) is TransactionTimedOut
    assert isinstance(error, TransactionNotInProgress)
    assert "31.2 s old" in error.detail
    assert "limit is 30 s" in error.detail
    assert "transactions.timeout_s" in error.hint
    assert "transactions.max_timeout_s" in error.hint


def test_the_same_refusal_in_time_is_raised_unchanged():
    stage = Stage({})
    transaction = stage.started()
    stage.service.states[transaction.id] = "invalid"
    assert type(stage.caught(stage.context.finish)) is TransactionNotInProgress


# --- interruptions -------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Replaces KeyboardInterrupt."""


def test_an_interrupted_finish_is_rolled_back_before_the_decision():
    stage = Stage({})
    stage.started()

    def interrupt(happen: Any) -> Any:
        stage.events.clear()
        raise Interrupted

    stage.service.instead["prepare"] = [interrupt]
    with pytest.raises(Interrupted):
        stage.run(stage.context.finish)
    assert stage.events == [*each("rollback_tx"), "service.abort"]
    assert stage.context.state == "aborted"


@pytest.mark.parametrize("took", [True, False], ids=["it took", "it did not"])
def test_an_interrupted_commit_is_completed(took: bool):
    stage = Stage({})
    transaction = stage.started()

    def interrupt(happen: Any) -> Any:
        if took:
            happen()
        stage.events.clear()
        raise Interrupted

    stage.service.instead["commit"] = [interrupt]
    with pytest.raises(Interrupted):
        stage.run(stage.context.finish)
    assert stage.service.states[transaction.id] == "committed"
    assert stage.events == ["service.commit", *each("post_tx_commit")]
