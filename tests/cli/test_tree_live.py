"""``kvkeep tree URL``: the tree that a server has; a real one, and as no real one would say it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_server import chat, seen
from told_server import told

from kvkeep.cli import main
from kvkeep.cli.tree_view import tree

EVIL = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202eevil\u2066[red]x[/red]:smile:\ud800\r\n\x00"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)


def node(name, parent, tokens=16, below=16, text="text", **changed):
    return {
        "id": name, "parent": parent, "tokens": tokens, "pages": tokens // 16,
        "subtree_tokens": below, "subtree_nodes": 1, "references": 0, "pins": 0, "hits": 0,
        "text": text, "tier": "pool", "hidden": False, "count": 0, **changed,
    }  # fmt: skip


def said(*nodes):
    return {"page_size": 16, "at": 0, "total_nodes": 9, "total_pages": 60, "nodes": list(nodes)}


MAP = said(
    node(-1, None, 0, 500, "acme", subtree_nodes=8),
    node(-2, None, 0, 400, ""),
    node(7, -1, 32, 200, "The smaller one"),
    node(3, -1, 32, 300, "The larger one", pins=1, references=2, hits=1234),
    node(-99, 3, 160, 160, None, hidden=True, count=4, subtree_nodes=5),
    node(4, 3, 96, 96, "Deeper"),
    node(5, -2, 400, 400, None),
)


def drawn(answer, width=100, depth=8):
    return [line.plain.rstrip() for line in tree(answer, width, depth)]


# --- the drawing ----------------------------------------------------------------------------------


def test_the_largest_come_first_and_each_hangs_where_it_belongs():
    assert drawn(MAP) == [
        "9 nodes, 60 pages of 16 tokens",
        " below    own  pages   hits  node",
        "   500      0      0      0  acme",
        "   300     32      2  1,234  ├─ 3 The larger one · 2 refs · pinned",
        "    96     96      6      0  │  ├─ 4 Deeper",
        "   160    160     10      0  │  └─ … 4 smaller ones",
        "   200     32      2      0  └─ 7 The smaller one",
        "   400      0      0      0  (no cache_salt)",
        "   400    400     25      0  └─ 5 (no text)",
    ]


def test_what_is_deeper_is_counted():
    shown = drawn(MAP, depth=2)
    assert len(shown) == 7
    assert shown[3].endswith("└─ 3 The larger one · 2 refs · pinned · … 6 below") or shown[
        3
    ].endswith("├─ 3 The larger one · 2 refs · pinned · … 6 below")
    assert drawn(MAP, depth=1)[2].endswith("acme · … 2 below")


def test_marks_stay_in_sight_where_the_text_is_long():
    one = node(3, None, text="long " * 16, pins=1)
    for width in (60, 80, 200):
        line = drawn(said(one), width)[2]
        assert len(line) <= width
        assert line.endswith(" · pinned")


def test_a_deep_tree_and_a_circle_end():
    chain = [node(at, at - 1 if at else None) for at in range(3000)]
    assert len(drawn(said(*chain), depth=10_000)) == 3002
    assert len(drawn(said(node(1, 2), node(2, 1), node(3, 3), node(4, 77)))) == 4, (
        "1 and 2: a circle"
    )


def test_nothing_is_cached():
    assert drawn(said()) == ["9 nodes, 60 pages of 16 tokens", "nothing is cached"]
    assert drawn({}) == ["0 nodes, 0 pages of 0 tokens", "nothing is cached"]


anything = st.sampled_from(
    [None, True, -1, 3, 10**400, float("nan"), EVIL, [], [EVIL], {EVIL: EVIL}]
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {name: st.one_of(st.just(value), anything) for name, value in node(1, None).items()}
        )
        | anything,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_answer_breaks_the_drawing_or_gets_out_of_it(nodes):
    assert all(line.plain.isprintable() for line in tree(said(*nodes), 80, 8))


# --- asking ---------------------------------------------------------------------------------------


def test_what_is_asked_for(capsys):
    answers = {"/kv/map": MAP}
    with told(answers) as server:
        for arguments, paths in (
            ([], ["/kv/map?nodes=200"]),
            (["--salt", "a b&c"], ["/kv/map?namespace=a+b%26c&nodes=200"]),
        ):
            server.asked.clear()
            assert main(["tree", server.url, *arguments]) == 0
            assert server.paths() == paths
        out = capsys.readouterr().out
        assert all(line.isprintable() for line in out.splitlines())
        host_and_port = server.url.removeprefix("http://")
        assert main(["tree", host_and_port, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == MAP


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1"], "no server listens"),
        (["http://127.0.0.1:1", "--page-size", "4"], "--page-size is for a tree of prompts"),
        (["--salt", "x"], "--salt is for the tree of a server: give its URL"),
        (["127.0.0.1:1", "--depth", "0"], "--depth is 0"),
        (["no.such.file"], "no.such.file cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(["tree", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_file_that_is_called_like_a_server_is_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "localhost:1").write_text("[1,2,3,4,5]\n")
    assert main(["tree", "localhost:1"]) == 0
    assert "1 prompts, 5 tokens" in capsys.readouterr().out


# --- a real server --------------------------------------------------------------------------------


@pytest.mark.model
def test_the_tree_of_a_real_server(capsys, monkeypatch):
    with seen() as url:
        for question in ("What does heapq.merge do?", "What does json.dumps do?"):
            chat(url, "22:05:31", question, cache_salt="acme")
        chat(url, "22:05:31", "What does json.dumps do?")
        assert main(["tree", url]) == 0
        out = capsys.readouterr().out
        assert " acme" in out
        assert "(no cache_salt)" in out
        assert "You are a helpful" in out
        assert main(["tree", url, "--salt", "acme", "--json"]) == 0
        nodes = json.loads(capsys.readouterr().out)["nodes"]
        assert len(nodes) > 1


@pytest.mark.model
def test_a_server_that_shows_no_text_shows_none_here(capsys, monkeypatch):
    monkeypatch.setenv("KVKEEP_API_KEY", "secret")
    with seen(api_key="secret", text=False) as url:
        chat(url, "22:05:31", "What does heapq.merge do?", key="secret")
        name = chat(url, "22:05:32", "What does heapq.merge do?", key="secret")
        assert main(["tree", url]) == 0
        out = capsys.readouterr().out
        assert "(no text)" in out
        assert main(["explain", url, name]) == 0
        out += capsys.readouterr().out
        assert "differs: they differ from" in out
        assert "helpful" not in out
        assert "the first difference" not in out
        assert "token ids" not in out
        monkeypatch.delenv("KVKEEP_API_KEY")
        assert main(["tree", url]) == 2
        assert "needs an API key" in capsys.readouterr().err
