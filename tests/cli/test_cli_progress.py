"""The progress line of a long publish."""

from __future__ import annotations

from plainsong.cli import output as progress_line


def test_progress_is_shown_after_a_while_and_erased_again(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    progress = progress_line.Progress(4000, wanted=True)
    progress.show(10, 100)
    assert capsys.readouterr().err == ""
    now[0] += 2
    progress.show(2000, 1000)
    assert capsys.readouterr().err == "\r2 000 messages, 1000 B (25 %), 1 000/s\x1b[K"
    progress.show(2001, 1001)
    progress.clear()
    progress.clear()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_progress_is_shown_only_where_a_person_sees_it(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    progress = progress_line.Progress(None, wanted=False)
    now[0] += 60
    progress.show(10, 100)
    progress.clear()
    assert capsys.readouterr().err == ""
