"""``--share`` and ``--public-prefixes``: what they read, and what they refuse."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.cli.tenants import add_tenant_options, eviction_of, public_rows
from kvkeep.core.eviction.shares import Shares

if TYPE_CHECKING:
    from pathlib import Path


def parsed(*options: str, eviction: str = "lru") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--eviction", default=eviction)
    add_tenant_options(parser)
    return parser.parse_args(options)


def test_without_shares_it_is_the_named_policy() -> None:
    assert eviction_of(parsed()) == "lru"


def test_shares_have_weights() -> None:
    made = eviction_of(parsed("--share", "a=3", "--share", "b=x=0.5", "--share", "=2"))
    assert isinstance(made, Shares)
    assert made.weights == {"a": 3.0, "b=x": 0.5, "": 2.0}


@pytest.mark.parametrize("text", ["a", "a=", "a=b", "a=0", "a=-1", "a=nan", "a=inf"])
def test_wrong_shares_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="share"):
        eviction_of(parsed("--share", text))


@pytest.mark.parametrize("name", ["2q", "returns", "adaptive"])
def test_shares_go_with_every_policy(name: str) -> None:
    made = eviction_of(parsed("--share", "a=1", eviction=name))
    assert isinstance(made, Shares)
    assert made.name == f"{name}+shares"


def test_rows_of_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text("[1, 2, 3]\n\n[4]\n")
    assert public_rows(file, None) == [[1, 2, 3], [4]]


@pytest.mark.parametrize("line", ["{", '"text"', "3", '{"messages": 1}', "[" * 100_000])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text(f"[1]\n{line}\n")
    with pytest.raises(InvalidValue, match="line 2"):
        public_rows(file, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot read public prefixes"):
        public_rows(tmp_path / "none", None)


def test_texts_and_messages_are_rendered_by_the_tokenizer(tmp_path: Path) -> None:
    from kvkeep.serve.engine import Tokenizer
    from kvkeep.serve.models import bundled_model

    tokenizer = Tokenizer.load(bundled_model())
    system = {"role": "system", "content": "You help."}
    file = tmp_path / "public.jsonl"
    file.write_text(json.dumps({"messages": [system]}) + "\n" + json.dumps("Once upon") + "\n")
    chat, text = public_rows(file, tokenizer)
    prompt = tokenizer.chat([system, {"role": "user", "content": "Hello"}])
    assert prompt[: len(chat)].tolist() == list(chat)
    assert len(chat) > len(tokenizer.encode("You help."))
    assert list(text) == tokenizer.encode("Once upon").tolist()
