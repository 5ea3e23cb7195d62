"""``kvkeep usage``: the table and JSON, of a real server and of an odd one."""

from __future__ import annotations

import json

import httpx
import pytest
from seen_server import chat, seen
from told_server import failure, told

from kvkeep.cli import main

ROW = {
    "cache_salt": "a", "requests": 2, "prompt_tokens": 12_345, "read_tokens": 1000,
    "computed_tokens": 11_345, "written_tokens": 1024, "generated_tokens": 10,
    "pool_tokens": 512, "tier_tokens": 0,
}  # fmt: skip
ODD = [
    {**ROW, "cache_salt": "\x1b[2J[red]\u202e", "requests": "many", "pool_tokens": None},
    {"cache_salt": 7, "more": [1]},
    "nothing",
    {**ROW, "cache_salt": None},
]


def run(capsys, *arguments):
    code = main(["usage", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.model
def test_of_a_real_server(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with seen() as url:
        for _ in range(2):
            chat(url, "noon", "Hello?", cache_salt="acme")
        chat(url, "noon", "Hello?")
        answer = httpx.get(f"{url}/kv/usage").json()
        code, table, _ = run(capsys, url)
        assert code == 0
        shown = json.loads(run(capsys, url, "--json")[1])
    lines = [line.strip() for line in table.splitlines()]
    (acme,) = [line for line in lines if line.startswith("acme")]
    row = answer["tenants"][0]
    assert row["cache_salt"] == "acme"
    assert f"{row['prompt_tokens']:,}" in acme.split()
    assert any(line.startswith("(none)") for line in lines)
    assert "(others)" not in table
    assert [one["cache_salt"] for one in shown["tenants"]] == ["acme", "", None]


def test_of_a_server_that_says_odd_things(capsys):
    with told({"/kv/usage": {"tenants": ODD}}) as server:
        code, table, _ = run(capsys, server.url)
        assert code == 0
        assert "\x1b" not in table
        assert "12.3 k" in table
        assert "(others)" in table


def test_mistakes_are_one_line(capsys):
    with told({"/kv/usage": (404, failure("no such address"))}) as server:
        code, _, error = run(capsys, server.url)
    assert code == 2
    assert error.startswith("kvkeep: error:")
    assert error.count("\n") == 1
