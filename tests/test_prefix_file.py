"""Public prefixes in a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.core.public import read_prefixes

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_of_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text("[1, 2, 3]\n\n[4]\n")
    assert [row.tolist() for row in read_prefixes(file, None)] == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    "line", ["{", '"text"', "3", '{"messages": 1}', "[" * 100_000, "[-1]", "[[1]]", "[]"]
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text(f"[1]\n{line}\n")
    with pytest.raises(InvalidValue, match="line 2"):
        read_prefixes(file, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot read public prefixes"):
        read_prefixes(tmp_path / "none", None)


def test_lines_end_with_a_line_feed_alone(tmp_path: Path) -> None:
    """A text may have other separators of lines, and a file may begin with a byte order mark."""
    file = tmp_path / "public.jsonl"
    file.write_text("\ufeff[1]\r\n[2,\u2028 3]\n".replace("\u2028", " "), encoding="utf-8")
    assert [row.tolist() for row in read_prefixes(file, None)] == [[1], [2, 3]]
    file.write_text('[1]\n"a\u2028b"\n', encoding="utf-8")
    with pytest.raises(InvalidValue, match="line 2: there is no tokenizer"):
        read_prefixes(file, None)


def test_other_fields_beside_messages_are_refused(tmp_path: Path) -> None:
    from kvkeep.serve.engine import Tokenizer
    from kvkeep.serve.models import bundled_model

    file = tmp_path / "public.jsonl"
    file.write_text(json.dumps({"messages": [], "tools": []}))
    with pytest.raises(InvalidValue, match="line 1: unknown field 'tools' beside messages"):
        read_prefixes(file, Tokenizer.load(bundled_model()))


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
