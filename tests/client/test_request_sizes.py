"""The sizes of a publisher's and a relay's requests on a slow line."""

from __future__ import annotations

from plainsong.request_sizes import ANSWERS_UNTIL_LARGER, RequestSizes


def test_a_timeout_halves_the_size_of_the_request_and_successes_double_it_up_to_the_maximum():
    sizes = RequestSizes(100, 1000)
    sizes.timed_out("t", 10, 1000)
    assert sizes.of("t") == (5, 500)
    seen = []
    while sizes.is_reduced("t"):
        seen.append(sizes.of("t"))
        sizes.passed("t")
    steps = [(5, 500), (10, 1000), (20, 1000), (40, 1000), (80, 1000)]
    assert seen == [each for each in steps for _ in range(ANSWERS_UNTIL_LARGER)]
    assert sizes.of("t") == (100, 1000)


def test_one_message_of_one_byte_remains_and_a_further_timeout_begins_the_count_again():
    sizes = RequestSizes(100, 1000)
    for _ in range(3):
        sizes.timed_out("t", 1, 0)
    assert sizes.of("t") == (1, 1)
    for _ in range(ANSWERS_UNTIL_LARGER - 1):
        sizes.passed("t")
    sizes.timed_out("t", 2, 2)
    sizes.passed("t")
    assert sizes.of("t") == (1, 1)


def test_topics_have_sizes_of_their_own():
    sizes = RequestSizes(100, 1000)
    sizes.timed_out("slow", 100, 1000)
    sizes.passed("other")
    assert (sizes.of("slow"), sizes.of("other")) == ((50, 500), (100, 1000))
