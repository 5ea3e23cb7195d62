"""``kvkeep tree`` on token ids and text, and what it says when it cannot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvkeep.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("[1,2,3,4,5,6,7,8,9]\n\n[1,2,3,4,5,6,7,9,9]\n[1,2,3,4,9]\n")
    return path


def test_draws_what_prompts_share(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", str(prompts)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("3 prompts, 23 tokens, 11 reused (48%)")
    assert out[1].startswith("└── 4 tokens · 1 page [0]")
    assert len(out) == 4


def test_json_has_the_same(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", str(prompts), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["stats"]["hit_tokens"] == 11
    assert answer["runs"][0]["tokens"] == [1, 2, 3, 4]
    assert answer["runs"][0]["pages"] == [0]


@pytest.mark.model
def test_text_goes_through_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree"]) == 0
    assert ".wrap do?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1, 2", "not a JSON array"), ("[-1]", "token ids lie in"), ("[1.5]", "integer ids")],
)
def test_wrong_lines_are_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text(content)
    assert main(["tree", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
