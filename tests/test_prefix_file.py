"""Public prefixes in a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.core.prefix_file import read_prefixes

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_of_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text("[1, 2, 3]\n\n[4]\n")
    assert [row.tolist() for row in read_prefixes(file, None)] == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    "line", ["{", '"text"', "3", '{"messages": 1}', "[" * 100_000, "[-1]", "[[1]]"]
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text(f"[1]\n{line}\n")
    with pytest.raises(InvalidValue, match="line 2"):
        read_prefixes(file, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot read public prefixes"):
        read_prefixes(tmp_path / "none", None)


def test_texts_and_messages_are_rendered_by_the_tokenizer(tmp_path: Path) -> None:
    from kvkeep.serve.engine import Tokenizer
    from kvkeep.serve.models import bundled_model

    tokenizer = Tokenizer.load(bundled_model())
    system = {"role": "system", "content": "You help."}
    file = tmp_path / "public.jsonl"
    file.write_text(json.dumps({"messages": [system]}) + "\n" + json.dumps("Once upon") + "\n")
    chat, text = read_prefixes(file, tokenizer)
    prompt = tokenizer.chat([system, {"role": "user", "content": "Hello"}])
    assert prompt[: len(chat)].tolist() == chat.tolist()
    assert len(chat) > len(tokenizer.encode("You help."))
    assert text.tolist() == tokenizer.encode("Once upon").tolist()
