"""The commit log loses no counted commit, whatever is lost, delayed, copied or killed; and it needs each of its rules."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.replication import answers, protocol
from storage.replication.notices import (
    LEASE,
    MAX_NUMBER,
    EpochSeal,
    Lease,
    Registration,
    decode_lease,
    decode_seal,
    encode_lease,
    encode_seal,
    log_name,
)
from storage.replication.segment import ASYNC, Commit, DamagedLog, Segment, digest, encode_segment
from tests.planted import planted, seeds_for
from tests.storage.replication.log_simulation import World

if TYPE_CHECKING:
    from types import ModuleType

SEEDS = 200
WORLDS_OF_MISTAKES = 2000
#: Worlds that show a mistake only after many others. A normal run tries them first; if the protocol has changed, the
#: search goes through all worlds again. ``make torture`` always searches.
QUICK_SEEDS = {
    "a seal of another run is taken for ours": 200,
    "a seal that is found to be ours is enough": 456,
    "it is damage": 332,
    "it counts": 1054,
}
RUN, OTHER = bytes(16), bytes([1] * 16)

#: Rule of the log, mistake, the correct code, the wrong code.
MISTAKES = [
    (
        "every start begins an epoch",
        "a start continues the last epoch",
        "        verdict = yield Create(log_name(place.epoch, place.number), seal)\n",
        "        if place.epoch: return place\n"
        "        verdict = yield Create(log_name(place.epoch, place.number), seal)\n",
    ),
    (
        "every start begins an epoch",
        "the epoch is not sealed",
        "        verdict = yield Create(log_name(place.epoch, place.number), seal)\n",
        "        if place.epoch: return after(place, seal)[0]\n"
        "        verdict = yield Create(log_name(place.epoch, place.number), seal)\n",
    ),
    (
        "a number is used once",
        "a number is handed over again",
        "if self._last is None or first != self._last + 1:",
        "if self._last is None or first > self._last + 1:",
    ),
    (
        "a segment counts when all before it are stored",
        "a segment counts once it is stored itself",
        "        self._stored.add(number)\n",
        "        self._logged = max(self._logged, self._begun.get(number, self._logged), key=lambda at: at.number)\n"
        "        self._stored.add(number)\n",
    ),
    (
        "the end of an epoch is the first number that is missing",
        "a hole is skipped",
        "        if objects[0] is None:\n            return place\n",
        "        if objects[0] is None:\n"
        "            found = yield Get(log_name(place.epoch, place.number + 1))\n"
        "            if found is None:\n"
        "                return place\n"
        "            objects = [found.data]\n",
    ),
    (
        "the end of an epoch is the first number that is missing",
        "a later segment that was read ahead is applied although an earlier one is missing",
        "        if data is None:\n            break\n",
        "        if data is None:\n            continue\n",
    ),
    (
        "what stands after the seal is void",
        "what was read ahead after the seal is applied",
        "        if segment is None:\n            break\n        segments.append(segment)\n",
        "        if segment is None:\n            continue\n        segments.append(segment)\n",
    ),
    (
        "what stands after the seal is void",
        "reading continues after the seal",
        "return Place(seal.next, 1, digest(data), commit, seal.clean, seal.run), None",
        "return Place(place.epoch, place.number + 1, digest(data), place.commit), None",
    ),
    (
        "a refused create is compared",
        "what is there is taken for our own",
        "if found.data == upload.data:",
        "if found.data:",
    ),
    (
        "a refused create is compared",
        "a segment of our own run is taken for ours",
        "if found.data == upload.data:",
        "if is_segment(found.data) and decode_segment(found.data).run == decode_segment(upload.data).run:",
    ),
    (
        "a refused create with nothing there is tried again",
        "it ends the reign",
        "            continue  # refused because of another write under way, or lost\n",
        '            raise ReignOver("refused")\n',
    ),
    (
        "a lost answer is looked up",
        "it counts as stored",
        "        verdict = yield Create(upload.name, upload.data)\n        if verdict is Verdict.DONE:",
        "        verdict = yield Create(upload.name, upload.data)\n        if verdict is not Verdict.REFUSED:",
    ),
    (
        "the seal is compared",
        "a seal of another run is taken for ours",
        "        if place.number == 1 and place.before in attempts:\n",
        "        if place.number == 1 and place.epoch >= epoch:\n"
        "            return place\n"
        "        if place.number == 1 and place.before in attempts:\n",
    ),
    (
        "an epoch is held only with the answer to its seal",
        "a seal that is found to be ours is enough",
        "            begun = place.epoch\n",
        "            return place\n",
    ),
    (
        "what follows a segment that a clone's segment has replaced is void",
        "it is damage",
        "        return replace(place, number=place.number + 1, clean=False), None\n",
        '        raise DamagedLog("does not follow")\n',
    ),
    (
        "what follows a segment that a clone's segment has replaced is void",
        "it counts",
        "    if segment.before != place.before:\n",
        "    if False:\n",
    ),
    (
        "nothing counts without a base",
        "a base is not waited for",
        "return self._logged.commit if self._has_base else None",
        "return self._logged.commit",
    ),
    (
        "nothing counts without a base",
        "a base is expected to exist",
        "self._has_base = has_base and place.commit is not None",
        "self._has_base = True",
    ),
    (
        "the log says the mode",
        "async begins at once",
        "return self._logged.number > 1",
        "return True",
    ),
    (
        "the seal is created only if there is nothing",
        "the seal replaces an existing object",
        "        verdict = yield Create(log_name(place.epoch, place.number), seal)\n",
        "        name = log_name(place.epoch, place.number)\n"
        "        found = yield Get(name)\n"
        "        verdict = yield Create(name, seal) if found is None else Exchange(name, seal, found.etag)\n",
    ),
    (
        "a take-over reads the log to its end",
        "a segment that is found instead of the end is not applied",
        "            if batch.segments:\n                yield Apply(batch.segments)\n",
        "            if batch.segments and (yield Get(log_name(place.epoch, place.number))) is not None:\n"
        "                yield Apply(batch.segments)\n",
    ),
    (
        "a take-over that was overtaken is lost",
        "it continues with its epoch",
        "        if leased and place.epoch >= epoch:\n",
        "        if False:\n",
    ),
    (
        "nothing is begun but after a seal of one's own",
        "the log is begun although the answer to the seal was lost",
        "        if verdict is Verdict.DONE:\n            return after(place, seal)[0]\n",
        "        if verdict is not Verdict.REFUSED:\n            return after(place, seal)[0]\n",
    ),
]
#: The same for ``storage.replication.answers``.
MISTAKES_OF_ANSWERS = [
    (
        "seen is safe",
        "acknowledged before the upload",
        "elif self.counts(number) and not self._waiting:",
        "elif self._counted is not None:",
    ),
    (
        "seen is safe",
        "shown before it counts",
        "return self.counts(number) or not self.has_begun",
        "return True",
    ),
    (
        "nothing counts without a base",
        "acknowledged without one",
        "return self._counted is not None and number <= self._counted",
        "return number <= (self._counted or number)",
    ),
    (
        "a commit counts with all before it",
        "the first one that counts completes those after it",
        "while self._waiting and self.counts(self._waiting[0].number):",
        "while self._waiting and self._counted is not None:",
    ),
    (
        "nothing is acknowledged after the end of the reign",
        "answers that wait at the end are given",
        "self._waiting.popleft().completed(NotCounted(self._closed))",
        "self._waiting.popleft().completed(None)",
    ),
]


def first_violation(module: ModuleType, seeds: range, of_answers: ModuleType = answers) -> tuple[int, str] | None:
    for seed in seeds:
        found = World(module, seed, of_answers).run()
        if found is not None:
            return seed, found
    return None


def test_counted_commits_stay_and_a_start_succeeds_in_every_simulated_run():
    assert first_violation(protocol, range(SEEDS)) is None


@pytest.mark.torture
def test_counted_commits_stay_in_many_more_simulated_runs():
    assert first_violation(protocol, range(SEEDS, 100 * SEEDS)) is None


def shows(name: str, module: ModuleType, of_answers: ModuleType = answers) -> bool:
    """True if a simulated run is wrong because of a mistake: without it, the same run is not."""
    worlds = seeds_for(name, QUICK_SEEDS, range(WORLDS_OF_MISTAKES))
    return any(World(module, seed, of_answers).run() and not World(protocol, seed).run() for seed in worlds)


@pytest.mark.parametrize(
    ("rule", "name", "right", "wrong"), MISTAKES, ids=[f"{each[0]}: {each[1]}" for each in MISTAKES]
)
def test_each_planted_mistake_is_found(rule, name, right, wrong):
    del rule
    assert shows(name, planted(protocol, name, right, wrong))


@pytest.mark.parametrize(
    ("rule", "name", "right", "wrong"),
    MISTAKES_OF_ANSWERS,
    ids=[f"{each[0]}: {each[1]}" for each in MISTAKES_OF_ANSWERS],
)
def test_each_planted_mistake_of_answers_is_found(rule, name, right, wrong):
    del rule
    assert shows(name, protocol, planted(answers, name, right, wrong))


def fetched(data):
    return protocol.Fetched(data, "tag")


def answered(steps, *answers):
    """Give a procedure these answers, and return its last request, or its result once it has ended."""
    request = next(steps)
    for answer in answers:
        try:
            request = steps.send(answer)
        except StopIteration as done:
            return done.value
    return request


def test_a_missing_lease_refuses_the_start_whatever_the_log_has():
    for is_in_log in (False, True):
        with pytest.raises(protocol.BucketWentBack, match="missing") as refused:
            answered(protocol.choose_epoch(RUN, 7, is_in_log=is_in_log), None)
        assert refused.value.hint.startswith("start again")


SEGMENT = b"the last object of the log"
AT_ITS_END = protocol.Place(7, 4, digest(SEGMENT), 40)


def lease_of_a_start(place, *answers):
    """Return the last request of a start for which the lease is of epoch 5, though epoch 7 has begun."""
    older = fetched(encode_lease(Lease(5, OTHER)))
    own = protocol.OwnDirectory(40, frozenset([RUN, OTHER]), 40)
    return answered(protocol.take_over(RUN, place, known=7, directory=own), [None], older, *answers, older)


def test_a_start_replaces_a_lease_that_went_back_behind_the_log():
    found = lease_of_a_start(AT_ITS_END, fetched(SEGMENT))
    assert found == protocol.Exchange(LEASE, encode_lease(Lease(8, RUN)), "tag")


@pytest.mark.parametrize(
    ("place", "answers"),
    [
        (AT_ITS_END, [None]),
        (AT_ITS_END, [fetched(b"another object")]),
        (protocol.Place(7, 1, digest(SEGMENT), 40), []),  # the seal that began the epoch may be lost too
    ],
)
def test_a_lease_of_an_earlier_epoch_is_refused_if_the_log_does_not_show_the_later_one(place, answers):
    with pytest.raises(protocol.BucketWentBack, match="epoch 5") as refused:
        lease_of_a_start(place, *answers)
    assert refused.value.hint.startswith("start again")


def test_a_start_that_reads_a_later_epoch_in_the_log_replaces_a_lease_that_went_back_behind_it():
    seal = encode_seal(EpochSeal(9, OTHER))
    older = fetched(encode_lease(Lease(7, OTHER)))
    own = protocol.OwnDirectory(40, frozenset([RUN, OTHER]), 40)
    steps = protocol.take_over(RUN, AT_ITS_END, known=7, directory=own)
    found = answered(steps, [fetched(seal)], [None], older, older)
    assert found == protocol.Exchange(LEASE, encode_lease(Lease(10, RUN)), "tag")


def test_a_renewal_replaces_an_older_lease_only_if_the_log_has_everything():
    terms = protocol.Terms(0, allows_standby=True, is_free=True, is_kept=False)
    mine = Lease(8, RUN, renewed=6)
    for older in (Lease(8, RUN, renewed=3), Lease(7, OTHER)):
        with pytest.raises(protocol.LeaseWentBack) as refused:
            answered(protocol.renew(mine, 5, terms), fetched(encode_lease(older)))
        assert refused.value.hint.startswith("start again")
        request = answered(protocol.renew(mine, 5, terms, is_in_log=True), fetched(encode_lease(older)))
        assert request == protocol.Exchange(LEASE, encode_lease(mine), "tag")
    with pytest.raises(protocol.BucketWentBack, match="missing"):
        answered(protocol.renew(mine, 5, terms, is_in_log=True), None)


def test_a_lease_is_replaced_only_if_it_is_the_one_that_was_read():
    held = protocol.Fetched(encode_lease(Lease(7, OTHER)), "tag")
    mine = encode_lease(Lease(8, RUN))
    assert answered(protocol.choose_epoch(RUN, 7), held) == protocol.Exchange(LEASE, mine, "tag")
    assert answered(protocol.choose_epoch(RUN, 0), None) == protocol.Create(LEASE, encode_lease(Lease(1, RUN)))


def test_a_new_epoch_of_a_primary_has_its_own_terms_before_the_first_renewal():
    held = protocol.Fetched(encode_lease(Lease(7, OTHER, period_ms=10_000)), "tag")
    terms = protocol.Terms(30_000, allows_standby=False, is_free=True, is_kept=False)
    mine = encode_lease(Lease(8, RUN, period_ms=30_000, allows_standby=False))
    assert answered(protocol.choose_epoch(RUN, 7, terms=terms), held) == protocol.Exchange(LEASE, mine, "tag")


STANDBY, SECOND = Registration("a", 3, "db-2", 40), Registration("b", 1)


@pytest.mark.parametrize(
    ("is_free", "is_kept", "standbys", "guarded"),
    [
        (False, True, (STANDBY,), True),
        (False, False, (STANDBY,), False),  # the primary does not keep the terms yet
        (False, True, (), False),
        (True, False, (), True),
    ],
)
def test_a_lease_is_guarded_if_the_primary_keeps_its_terms_and_a_standby_is_registered(
    is_free, is_kept, standbys, guarded
):
    terms = protocol.Terms(10_000, allows_standby=True, is_free=is_free, is_kept=is_kept)
    applied = terms.applied(Lease(7, RUN, standbys=standbys))
    assert (applied.guarded, applied.standbys) == (guarded, standbys)
    assert decode_lease(encode_lease(applied)) == applied


def test_a_primary_removes_only_the_registration_whose_time_is_over():
    lease = Lease(7, RUN, standbys=(STANDBY, SECOND))
    terms = protocol.Terms(10_000, allows_standby=True, is_free=False, is_kept=True, gone=frozenset([STANDBY]))
    assert terms.applied(lease).standbys == (SECOND,)
    again = lease.registered(replace(STANDBY, beat=4))
    assert terms.applied(again).standbys == (replace(STANDBY, beat=4), SECOND)


def test_a_primary_that_allows_no_standby_removes_all_registrations():
    terms = protocol.Terms(10_000, allows_standby=False, is_free=True, is_kept=True)
    applied = terms.applied(Lease(7, RUN, standbys=(STANDBY,)))
    assert (applied.standbys, applied.guarded, applied.allows_standby) == ((), False, False)
    assert decode_lease(encode_lease(applied)) == applied


def test_a_standby_does_not_take_over_from_a_primary_that_allows_none_also_by_hand():
    never = Lease(7, OTHER, allows_standby=False, guarded=False)
    held = protocol.Fetched(encode_lease(never), "tag")
    for follower in (protocol.Follower(), protocol.Follower(never)):
        with pytest.raises(protocol.TakeOverLost, match="allows no standby"):
            answered(protocol.choose_epoch(RUN, 7, follower=follower), held)


def test_another_standby_that_registers_does_not_stop_a_take_over_and_is_registered_with_the_new_primary():
    seen = Lease(7, OTHER, renewed=5, period_ms=10_000, standbys=(STANDBY,))
    since = seen.registered(SECOND)
    held = protocol.Fetched(encode_lease(since), "tag")
    steps = protocol.choose_epoch(RUN, 7, follower=protocol.Follower(seen, STANDBY.id))
    mine = replace(since, epoch=8, run=RUN, renewed=0, standbys=(SECOND,))
    assert answered(steps, held) == protocol.Exchange(LEASE, encode_lease(mine), "tag")


def test_a_lost_answer_of_the_lease_is_a_success_also_if_a_standby_has_registered_since():
    held = protocol.Fetched(encode_lease(Lease(7, OTHER)), "tag")
    mine = protocol.Fetched(encode_lease(Lease(8, RUN).registered(STANDBY)), "new")
    assert answered(protocol.choose_epoch(RUN, 7), held, protocol.Verdict.UNKNOWN, mine) == 8
    terms = protocol.Terms(0, allows_standby=True, is_free=True, is_kept=False)
    renewed = protocol.renew(Lease(8, RUN, renewed=1), 0, terms)
    before = protocol.Fetched(encode_lease(Lease(8, RUN)), "tag")
    after = Lease(8, RUN, renewed=1).registered(STANDBY)
    found = protocol.Fetched(encode_lease(after), "new")
    assert answered(renewed, before, protocol.Verdict.UNKNOWN, found) == after


def test_a_lease_of_a_version_without_registrations_is_guarded_if_it_allows_a_standby():
    for allows in (True, False):
        fields = json.loads(encode_lease(Lease(7, OTHER)))
        del fields["standbys"]
        old = json.dumps(fields | {"allowsStandby": allows}).encode()
        lease = decode_lease(old)
        assert (lease.allows_standby, lease.guarded, lease.standbys) == (allows, allows, ())


def test_a_standby_of_a_version_without_registrations_sees_no_permission_in_a_lease_that_is_not_guarded():
    shown = json.loads(encode_lease(Lease(7, OTHER, guarded=False)))
    assert shown["allowsStandby"] is False


def test_a_lost_answer_of_the_lease_is_a_success_if_the_lease_is_ours():
    held, mine = (protocol.Fetched(encode_lease(each), "tag") for each in (Lease(7, OTHER), Lease(8, RUN)))
    assert answered(protocol.choose_epoch(RUN, 7), held, protocol.Verdict.UNKNOWN, mine) == 8
    theirs = protocol.Fetched(encode_lease(Lease(8, OTHER)), "new")
    again = answered(protocol.choose_epoch(RUN, 7), held, protocol.Verdict.UNKNOWN, theirs, theirs)
    assert again == protocol.Exchange(LEASE, encode_lease(Lease(9, RUN)), "new")


def test_a_write_of_the_lease_that_took_effect_late_does_not_end_the_take_over_of_a_standby():
    seen, mine = Lease(7, OTHER), Lease(8, RUN)
    held, written = (protocol.Fetched(encode_lease(each), "tag") for each in (seen, mine))
    steps = protocol.choose_epoch(RUN, 7, follower=protocol.Follower(seen))
    assert answered(steps, held, protocol.Verdict.UNKNOWN, held, written) == 8


def test_a_seal_whose_answer_was_lost_is_ended_too_since_a_clone_may_have_had_the_answer():
    seal, again = (encode_seal(EpochSeal(number, RUN)) for number in (1, 2))
    done, unknown, lease = protocol.Verdict.DONE, protocol.Verdict.UNKNOWN, fetched(encode_lease(Lease(1, RUN)))
    found = (None, done, [None], unknown, [fetched(seal)], [None], lease, done)
    request = answered(protocol.take_over(RUN, protocol.ROOT), *found)
    assert request == protocol.Create(log_name(1, 1), again)
    assert answered(protocol.take_over(RUN, protocol.ROOT), *found, done).epoch == 2


def test_without_a_lease_too_a_seal_whose_answer_was_lost_is_ended():
    seal, again = (encode_seal(EpochSeal(number, RUN)) for number in (1, 2))
    steps = protocol.take_over(RUN, protocol.ROOT, leased=False)
    request = answered(steps, [None], protocol.Verdict.UNKNOWN, [fetched(seal)], [None])
    assert request == protocol.Create(log_name(1, 1), again)


def test_a_standby_whose_answer_to_the_seal_was_lost_takes_over_unless_the_lease_is_not_its_own_any_more():
    seen, seal = Lease(1, OTHER), encode_seal(EpochSeal(2, RUN))
    place, done, lost = protocol.Place(1, 5, digest(b"x"), 40), protocol.Verdict.DONE, protocol.Verdict.UNKNOWN
    mine = fetched(encode_lease(Lease(2, RUN)))
    found = (fetched(encode_lease(seen)), done, [None], mine, lost, [fetched(seal)], [None])
    attempts = [protocol.take_over(RUN, place, known=1, follower=protocol.Follower(seen)) for _ in range(2)]
    held = fetched(encode_lease(Lease(2, RUN, renewed=3)))  # it renews its lease while it takes over
    own = answered(attempts[0], *found, held, done, fetched(encode_lease(Lease(3, RUN))))
    assert own == protocol.Create(log_name(2, 1), encode_seal(EpochSeal(3, RUN)))
    with pytest.raises(protocol.TakeOverLost, match="the lease has changed"):
        answered(attempts[1], *found, fetched(encode_lease(Lease(3, OTHER))))


def own_directory(**changes):
    """Return a directory whose last place is in an epoch that ``RUN`` writes."""
    fields = {"last": 50, "runs": frozenset([RUN, OTHER]), "since": 40, "applies": True, "writer": RUN}
    return protocol.OwnDirectory(**{**fields, **changes})


def test_a_deposed_primary_that_starts_again_leaves_the_lease_alone():
    place, foreign = protocol.Place(3, 5, digest(b"x"), 40), encode_seal(EpochSeal(4, bytes([2] * 16), holder="second"))
    steps = protocol.take_over(OTHER, place, known=3, directory=own_directory())
    assert next(steps) == protocol.GetAll([log_name(3, 5)])
    with pytest.raises(protocol.Foreign, match="second has continued the log in epoch 3; 10 commits"):
        steps.send([fetched(foreign)])


def test_a_seal_of_a_run_that_has_written_segments_is_a_clones():
    place, seal = protocol.Place(3, 5, digest(b"x"), 40), encode_seal(EpochSeal(4, RUN))
    with pytest.raises(protocol.Foreign):
        answered(protocol.take_over(OTHER, place, known=3, directory=own_directory()), [fetched(seal)])
    # The epoch was ours if we started and ended before our first segment.
    begun = protocol.take_over(OTHER, place, known=3, directory=own_directory(writer=b""))
    assert answered(begun, [fetched(seal)]) == protocol.GetAll([log_name(4, 1), log_name(4, 2)])
    segment = Segment(4, 1, RUN, ASYNC, 41, digest(seal), (Commit(1, ()),), 1, 1)
    steps = protocol.take_over(OTHER, place, known=3, directory=own_directory(writer=b""))
    assert isinstance(answered(steps, [fetched(seal)], [fetched(encode_segment(segment))]), protocol.Apply)
    with pytest.raises(protocol.Foreign):
        answered_on(steps, None, [fetched(encode_seal(EpochSeal(5, RUN)))])


def answered_on(steps, *answers):
    """Give further answers to a procedure that has begun, and return its last request."""
    for answer in answers:
        request = steps.send(answer)
    return request


def test_after_a_seal_with_a_gap_the_last_commit_is_not_known_and_nothing_counts_before_a_new_base():
    place = protocol.Place(3, 5, digest(b"x"), 40)
    behind, _ = protocol.after(place, encode_seal(EpochSeal(4, RUN, gap=True)))
    assert (behind.epoch, behind.number, behind.commit) == (4, 1, None)
    reign = protocol.Reign(behind, RUN, ASYNC, has_base=True)
    opening = reign.open(50, 0)
    reign.stored(opening.number)
    assert (reign.logged, reign.counted) == (50, None)
    reign.based()
    assert reign.counted == 50


def seals_across_a_gap(module: ModuleType) -> bool:
    """Let a standby take over at a place where the log ends with a gap; return whether it tries to seal there."""
    gap = module.Fetched(encode_seal(EpochSeal(4, OTHER, gap=True)), "tag")
    lease = module.Fetched(encode_lease(Lease(4, OTHER)), "tag")
    place = module.Place(3, 5, digest(b"x"), 40)
    steps = module.take_over(RUN, place, known=3, follower=module.Follower())
    mine = module.Fetched(encode_lease(Lease(5, RUN)), "new")
    try:
        return isinstance(answered(steps, lease, module.Verdict.DONE, [gap], [None], mine), module.Create)
    except module.TakeOverLost:
        return False


def test_a_standby_does_not_take_over_across_a_gap():
    assert not seals_across_a_gap(protocol)
    guard = "if follower is not None and place.commit is None:"
    assert seals_across_a_gap(planted(protocol, "it does", guard, "if False:"))


@pytest.mark.parametrize("lost_to", [Lease(3, OTHER, renewed=9), Lease(5, OTHER)])
def test_a_standby_seals_only_while_the_lease_is_its_own(lost_to):
    place, held = protocol.Place(3, 5, digest(b"x"), 40), Lease(3, OTHER)
    steps = protocol.take_over(RUN, place, known=3, follower=protocol.Follower(held))
    answers = [protocol.Fetched(encode_lease(held), "tag"), protocol.Verdict.DONE, [None]]
    assert answered(steps, *answers) == protocol.Get(LEASE)
    with pytest.raises(protocol.TakeOverLost, match="renewed or taken the lease"):
        steps.send(protocol.Fetched(encode_lease(lost_to), "new"))
    steps = protocol.take_over(RUN, place, known=3, follower=protocol.Follower(held))
    mine = protocol.Fetched(encode_lease(Lease(4, RUN)), "new")
    assert answered(steps, *answers, mine).name == log_name(3, 5)


def test_a_run_that_does_not_serve_yet_renews_only_its_own_lease_and_changes_nothing_else_in_it():
    held = Lease(7, RUN, "db-2", period_ms=10_000, standbys=(STANDBY,), clock_ms=5)
    renewed = protocol.Exchange(LEASE, encode_lease(replace(held, renewed=3)), "tag")
    assert answered(protocol.hold(RUN, 3), protocol.Fetched(encode_lease(held), "tag")) == renewed
    assert answered(protocol.hold(OTHER, 3), protocol.Fetched(encode_lease(held), "tag")) is False
    assert answered(protocol.hold(RUN, 3), None) is False


def test_a_lease_has_the_clock_of_the_primary_and_one_of_an_earlier_version_has_none():
    terms = protocol.Terms(10_000, allows_standby=True, is_free=True, is_kept=False, clock_ms=1234)
    lease = terms.applied(Lease(7, RUN, clock_ms=1000))
    assert decode_lease(encode_lease(lease)).clock_ms == 1234
    fields = json.loads(encode_lease(lease))
    del fields["clockMs"]
    assert decode_lease(json.dumps(fields).encode()) == replace(lease, clock_ms=None)


def test_objects_are_read_ahead_up_to_one_that_is_missing_or_cannot_be_read():
    ahead, place, widths = protocol.ReadAhead(), protocol.Place(3, 5, digest(b"x"), 40), []
    for objects in ([b"1"], [b"1", b"2"], [b"1", b"2", b"3", None], [b"1"], [b"1"]):
        widths.append(len(ahead.names(place)))
        ahead.took(objects)
    assert widths == [1, 2, 4, 1, 2]
    assert ahead.names(place) == [log_name(3, 5)]


def test_a_seal_that_names_no_later_epoch_is_damage():
    with pytest.raises(DamagedLog, match="names epoch 3"):
        protocol.after(protocol.Place(3, 5, digest(b"x"), 40), encode_seal(EpochSeal(3, RUN)))


NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
LEASE_FIELDS = ("epoch", "renewed", "counted", "clockMs", "periodMs")


@given(
    field=st.sampled_from(LEASE_FIELDS), value=NUMBERS | st.lists(NUMBERS, max_size=2), beat=NUMBERS, following=NUMBERS
)
def test_numbers_of_a_lease_and_of_a_seal_are_in_range_or_damage(field, value, beat, following):
    fields = json.loads(encode_lease(Lease(3, RUN))) | {field: value}
    standby = {"standbys": {"one": {"beat": beat, "holder": "", "commit": 1}}}
    for found in (fields, fields | standby):
        with suppress(DamagedLog):
            lease = decode_lease(json.dumps(found).encode())
            numbers = (lease.epoch, lease.renewed, lease.counted or 0, lease.clock_ms or 0, lease.period_ms)
            assert all(0 <= number <= MAX_NUMBER for number in (*numbers, *(each.beat for each in lease.standbys)))
    seal = {"seal": True, "next": following, "run": RUN.hex(), "clean": True, "gap": False, "holder": ""}
    with suppress(DamagedLog):
        assert 0 <= decode_seal(json.dumps(seal).encode()).next <= MAX_NUMBER
