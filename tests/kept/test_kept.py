"""A daemon on a data directory of each earlier layout answers as when the directory was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kept.asking import ask_everything
from tests.kept.make import restore

KEPT = sorted(path.parent for path in Path(__file__).parent.glob("*/answers.json"))


def says_what_was_said(now: Any, then: Any, where: str) -> None:
    """Check that the answer is unchanged, apart from fields and headers that later versions add."""
    if isinstance(then, dict):
        assert isinstance(now, dict), where
        assert then.keys() <= now.keys(), where
        for key, value in then.items():
            if key.endswith("PerSecond"):  # depends on the test's speed
                assert isinstance(now[key], int | float), where
            elif key == "hiddenMessages" and "/v1/transactions" in where:
                # Earlier versions counted only the topic with the most, instead of all topics.
                assert now[key] >= value, where
            else:
                says_what_was_said(now[key], value, f"{where}: {key}")
    elif isinstance(then, list):
        assert isinstance(now, list), where
        assert len(now) == len(then), where
        for index, (one, other) in enumerate(zip(now, then, strict=True)):
            says_what_was_said(one, other, f"{where}: {index}")
    else:
        assert now == then, where


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
async def test_a_kept_directory_gives_every_answer_it_gave_when_it_was_made(kept, tmp_path):
    expected = json.loads((kept / "answers.json").read_text(encoding="utf-8"))
    answers = await ask_everything(shutil.copytree(kept / "data", tmp_path / "data"))
    assert answers.keys() == expected.keys()
    for question, answer in expected.items():
        says_what_was_said(json.loads(json.dumps(answers[question])), answer, question)


@pytest.mark.parametrize("kept", [path for path in KEPT if (path / "backup").exists()], ids=lambda path: path.name)
async def test_a_kept_backup_is_whole_and_restored_gives_every_answer_it_gave(kept, tmp_path):
    expected = json.loads((kept / "restored.json").read_text(encoding="utf-8"))
    await restore(shutil.copytree(kept / "backup", tmp_path / "backup"), tmp_path / "data")
    answers = await ask_everything(tmp_path / "data")
    assert answers.keys() == expected.keys()
    for question, answer in expected.items():
        says_what_was_said(json.loads(json.dumps(answers[question])), answer, question)


def test_there_is_a_kept_directory():
    assert [path.name for path in KEPT] == ["0.1", "0.2", "0.2.dev"]
