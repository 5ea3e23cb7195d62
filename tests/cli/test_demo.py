"""The demo from end to end: a real model, cold against warm."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvkeep.cli import demo, main

pytestmark = pytest.mark.model


def test_the_demo_reuses_and_generates_the_same(capsys):
    assert main(["demo", "--json", "--max-tokens", "24"]) == 0
    shown = json.loads(capsys.readouterr().out)
    first, *others = shown["requests"]
    assert len(others) >= 4
    assert shown["identical"] is True
    assert all(row["identical"] for row in shown["requests"])
    assert first["reused_tokens"] == 0
    for row in others:
        # All but the question itself, of a long document.
        assert row["prompt_tokens"] > 1500
        assert row["reused_tokens"] > 0.95 * row["prompt_tokens"]
        assert row["ttft_warm_s"] < row["ttft_cold_s"]  # a hundredth of the work
        assert row["text"].strip()
    # The second turn finds the first one whole, not only the document (but for half a page).
    assert others[-1]["reused_tokens"] > others[-2]["prompt_tokens"] - 16
    assert shown["reused_tokens"] == sum(row["reused_tokens"] for row in shown["requests"])
    assert shown["reused_tokens"] == shown["cache"]["hit_tokens"]
    assert shown["cache"]["sequences"] == 0


@pytest.fixture
def short(monkeypatch):
    """A shorter document, for what does not depend on its length, on a terminal's width."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "SECTIONS", (*demo.ASKED, demo.FOLLOW_UP))


def test_the_table(short, capsys):
    assert main(["demo", "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in (*demo.ASKED, f"then {demo.FOLLOW_UP}"):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(name)]
        assert line.rstrip().endswith("yes")
        assert "…" not in line  # it fits 80 columns
    assert "× sooner (median)" in out.splitlines()[-1]


def test_one_other_token_fails_it(short, monkeypatch, capsys):
    run_warm = demo.Demo.run_warm

    def tampered(self, advance):
        done, stats = run_warm(self, advance)
        wrong = (*done[2].tokens[:-1], done[2].tokens[-1] + 1)
        return [*done[:2], dataclasses.replace(done[2], tokens=wrong), *done[3:]], stats

    monkeypatch.setattr(demo.Demo, "run_warm", tampered)
    assert main(["demo", "--max-tokens", "3"]) == 1
    out, err = capsys.readouterr()
    assert "NO" in out
    assert "other tokens than the cold one" in err


def test_lost_kv_fails_it(short, monkeypatch, capsys):
    """Not only the comparison: what the model reads from the pages decides."""
    run_warm = demo.Demo.run_warm

    def forgetful(self, advance):
        runner = self._runner
        forward = runner.forward

        def forward_and_forget(pieces, **how):
            logits = forward(pieces, **how)
            for layer in range(runner.geometry.layers):
                runner.tensors.v(layer).zero_()
            return logits

        monkeypatch.setattr(runner, "forward", forward_and_forget)
        return run_warm(self, advance)

    monkeypatch.setattr(demo.Demo, "run_warm", forgetful)
    assert main(["demo", "--max-tokens", "8"]) == 1
    assert "NO" in capsys.readouterr().out


def test_the_document_is_readable_text():
    document = demo.read_document()
    for name in demo.SECTIONS:
        assert f"# {name}\n\n" in document
    assert 4000 < len(document) < 20000
    assert document.replace("\n", " ").isprintable()
