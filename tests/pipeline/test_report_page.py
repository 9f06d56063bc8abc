"""The page is one file that needs nothing else, follows light and dark, and says how its figures are computed."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from itertools import combinations
from math import dist
from xml.etree import ElementTree

import pytest

from plainsong.cli.command import Exit
from plainsong.cli.main import run
from plainsong.protocol.errors import InvalidParameter
from pyspark_plainsong.pipeline import session
from pyspark_plainsong.pipeline.report import command, figures, page
from pyspark_plainsong.pipeline.report.facts import MADE_FROM, Grid, Report, TopicFacts, grid_over, with_archive
from pyspark_plainsong.pipeline.report.page import page_of, write_page
from pyspark_plainsong.pipeline.report.sources import MESSAGES, Asked
from pyspark_plainsong.pipeline.report.text import as_json, lines_of, show_count, show_rate
from tests.pipeline import reported

START_MS = 1_700_000_000_000
FACTS = [
    TopicFacts("ns:a", 1, 20_000, START_MS + 5_000, False, {}),
    TopicFacts("ns:b", 2, 3_000, START_MS, True, {}),
    TopicFacts("ns:c", 1, 10**9, START_MS, False, {}, "a <note> about it"),
]


@pytest.fixture(scope="module")
def made(spark) -> Report:
    rows, decisions = reported.a_history(11, 300, START_MS)
    messages = spark.createDataFrame(rows, MESSAGES).coalesce(2).cache()
    grid = grid_over(START_MS, START_MS + 60_000)
    frames = figures.frames_of(spark, messages, FACTS, Asked(decisions), grid, START_MS + 60_000)
    return figures.report_of(frames, FACTS, grid, START_MS + 60_000, len(rows), ["two pointers <too many>"])


def svgs(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, re.DOTALL)


def test_the_page_has_a_plot_for_each_kind_of_figure_and_needs_nothing_from_elsewhere(made):
    page = page_of(made)
    assert len(svgs(page)) == 4
    assert "<script" not in page
    links = re.findall(r"""(?:src|href)=["']([^"']+)|url\(([^)]+)\)""", page)
    assert all((one or other).startswith("#") for one, other in links)
    assert page.count("<html") == page.count("</html>") == 1


def test_plots_are_complete_describe_themselves_and_share_no_ids(made):
    ids: list[str] = []
    for svg in svgs(page_of(made)):
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label")
        assert root.get("role") == "img"
        ids += [
            value for each in root.iter() for name, value in each.attrib.items() if name == "id" and "_" not in value
        ]
    assert len(ids) == len(set(ids))


def test_plots_take_the_colours_of_the_page(made):
    page = page_of(made)
    assert "prefers-color-scheme: dark" in page
    for svg in svgs(page):
        assert "currentColor" in svg
        assert "#010203" not in svg
        assert "#000000" not in svg


def test_every_section_names_its_sources_and_its_gaps(made):
    for text in (unescape(page_of(made)), " ".join(" ".join(lines_of(made)).split())):
        for key, said in MADE_FROM.items():
            assert said in text, key
    assert "two pointers &lt;too many&gt;" in page_of(made)
    assert "a &lt;note&gt; about it" in page_of(made)
    assert "c: a <note> about it" in as_json(made)["notes"]


def test_the_same_report_gives_the_same_page(made, tmp_path):
    write_page(made, tmp_path / "one.html")
    assert (tmp_path / "one.html").read_text() == page_of(made)
    assert [path.name for path in tmp_path.iterdir()] == ["one.html"]


def test_an_empty_topic_has_a_page_too(spark):
    grid = Grid(START_MS, START_MS + 1000, 1000)
    messages = spark.createDataFrame([], MESSAGES)
    frames = figures.frames_of(spark, messages, FACTS[:1], Asked([]), grid, START_MS)
    empty = figures.report_of(frames, FACTS[:1], grid, START_MS, 0, [])
    assert len(svgs(page_of(empty))) == 2
    assert "ns:a" in "\n".join(lines_of(empty))


def test_if_no_message_was_held_up_a_sentence_replaces_the_plot(made):
    at_once = [{**row, "p50_ms": 0, "p99_ms": 0, "max_ms": 0} for row in made.latency_steps]
    page = page_of(replace(made, latency_steps=at_once))
    assert "None of the readable messages was held" in page
    assert len(svgs(page)) == len(svgs(page_of(made))) - 1
    assert "None of the readable messages was held" not in page_of(made)


def test_sizes_are_lower_bounds_where_messages_expired_since(made):
    of_a = {row["time_ms"]: row["complete"] for row in made.of_topic(made.sizes, "ns:a")}
    assert {time_ms >= START_MS + 25_000 for time_ms, complete in of_a.items() if complete} == {True}
    assert all(row["complete"] for row in made.of_topic(made.sizes, "ns:b"))
    assert "≥" in "\n".join(lines_of(made))


# --- grids, and what an archive adds -------------------------------------------------------------------


@pytest.mark.parametrize(("range_s", "step_s"), [(1, 1), (120, 1), (121, 2), (86_400, 900), (365 * 86_400, 4 * 86_400)])
def test_steps_are_round_and_few_unless_asked_for(range_s, step_s):
    grid = grid_over(START_MS, START_MS + range_s * 1000)
    assert grid.step_ms == step_s * 1000
    assert grid.steps <= 120


def test_an_empty_range_and_a_range_with_too_many_steps_are_refused():
    with pytest.raises(InvalidParameter, match="empty"):
        grid_over(START_MS, START_MS)
    with pytest.raises(InvalidParameter, match="steps"):
        grid_over(START_MS, START_MS + 86_400_000, 1)


def test_with_an_archive_that_joins_up_with_the_topic_sizes_are_known_from_its_start():
    topic = FACTS[0]
    until = topic.known_from_ms
    assert with_archive(topic, [(10, 20), (30, until)], False).known_from_ms == 30
    assert not with_archive(topic, [(10, 20), (30, until)], True).whole
    assert with_archive(topic, [(10, until + 5)], True).whole
    behind = with_archive(topic, [(10, until - 1)], True)
    assert (behind.known_from_ms, behind.whole) == (until, False)
    assert "expired" in behind.note
    assert with_archive(topic, [], False) == topic
    assert with_archive(FACTS[1], [(10, 20)], True) == FACTS[1]


@pytest.fixture
def _no_job(monkeypatch):
    """Fail if the daemon or Spark is used."""

    def never(*_):
        raise AssertionError("the job has begun")

    monkeypatch.setattr(command, "topics_of", never)


@pytest.mark.usefixtures("_no_job")
def test_without_the_plot_library_a_page_is_refused_before_anything_begins(monkeypatch, capsys, tmp_path):
    real = session.find_spec
    monkeypatch.setattr(session, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert run(command.report, ["--html", str(tmp_path / "page.html")], "report") == Exit.USAGE
    said = capsys.readouterr().err
    assert "matplotlib is not installed" in said
    assert 'hint: pip install "plainsong-spark[report]"' in said


@pytest.mark.usefixtures("_no_job")
def test_a_page_in_a_missing_folder_is_refused_before_anything_begins(capsys, tmp_path):
    assert run(command.report, ["--html", str(tmp_path / "none" / "page.html")], "report") == Exit.USAGE
    assert f"there is no folder {tmp_path}/none" in capsys.readouterr().err


def lightness_and_hue(colour: str) -> tuple[float, float, float]:
    """A colour in OKLab, where distances are as people see them."""
    red, green, blue = (
        (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
        for value in (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    )
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_no_two_lines_look_alike():
    assert len(page.COLOURS) == page.MAX_LINES
    for one, other in combinations(map(lightness_and_hue, page.COLOURS), 2):
        assert dist(one, other) > 0.1


@pytest.mark.parametrize("first", [0, 1, 5, 8, 13])
def test_lines_of_one_plot_have_different_colours_however_many_topics_there_are(made, first):
    names = [f"ns:t{number:02}" for number in range(30)]
    report = replace(made, topics=[replace(FACTS[0], topic=name) for name in names])
    drawn = [*names[first : first + 6], names[first + 8], names[first + 16]]
    lines = page._lines(report, [{"topic": name, "messages": 10} for name in drawn])
    assert sorted(topic for topic, _ in lines) == sorted(drawn)
    assert len({colour for _, colour in lines}) == page.MAX_LINES


def test_a_long_name_does_not_narrow_the_plot(made):
    name = "ns:" + "orders-of-the-northern-warehouse-" * 4 + "17"
    report = replace(
        made,
        topics=[replace(FACTS[0], topic=name)],
        **{
            kind: [{**row, "topic": name} for row in getattr(made, kind) if row["topic"] == "ns:a"]
            for kind in ("sizes", "rates", "latency_steps")
        },
    )
    for plot in page.plots_of(report):
        if plot.key in ("sizes", "rates"):
            assert "…" in plot.svg
            assert "17" in plot.svg
            (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', plot.svg)
            axes = re.search(r'<g id="patch_2">\s*<path d="M ([\d.]+) [\d.]+ \s*L ([\d.]+) ', plot.svg)
            assert axes is not None
            assert float(axes[2]) - float(axes[1]) > float(width) * 0.8


def test_names_that_differ_only_in_their_middle_have_different_labels():
    names = [f"ns:orders-of-the-northern-warehouse-{number}-of-the-european-region-by-day" for number in (1, 2, 31)]
    labels = page._labels([*names, "ns:a", "ns:_b"])
    assert len(set(labels.values())) == 5
    assert [labels["ns:a"], labels["ns:_b"]] == [" a", " _b"]
    assert max(map(len, labels.values())) <= page.MAX_NAME + 1


def test_a_scale_of_times_has_whole_minutes_and_hours(made):
    holds = [{**row, "held_ms": 7_200_000} for row in made.holds]
    (drawn,) = [plot.svg for plot in page.plots_of(replace(made, holds=holds)) if plot.key == "holds"]
    assert re.findall(r"<text[^>]*>(\d+[mh])</text>", drawn) == ["1m", "10m", "1h"]


@pytest.mark.parametrize(
    ("rate", "said"), [(0.0, "0"), (0.0031, "0.0031/s"), (0.04, "0.04/s"), (0.4, "0.4/s"), (2000.0, "2 000/s")]
)
def test_the_rate_of_a_quiet_topic_is_not_0(rate, said):
    assert show_rate(rate) == said


def test_numbers_are_grouped_the_same_way_everywhere(made):
    large = replace(made, messages=5_483)
    assert "from 5 483 messages of" in page_of(large)
    assert show_count(2000) == page._count(2000.0, None) == "2 000"
