"""``kvkeep explain``: of requests, prompts and all of them; against a real server, and odd ones."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from said_live import request, summary
from seen_server import chat, seen
from told_server import told

from kvkeep.cli import main
from kvkeep.cli.explain_view import explanation as draw
from kvkeep.cli.explain_view import summary as draw_summary

EVIL = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202eevil\u2066[red]x[/red]:smile:\ud800\r\n\x00"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)


def span(start, stop, source=None, reason=None, **evidence):
    return {"start": start, "stop": stop, "source": source, "reason": reason, "evidence": evidence}


def explained(**changed):
    return {
        **request(),
        "spans": [span(0, 400, "pool"), span(400, 500, "disk"), span(500, 812, None, "new")],
        "text": None,
        **changed,
    }


def drawn(said, width=120):
    return [line.plain for line in draw(said, width)]


# --- the drawing ----------------------------------------------------------------------------------


def test_a_span_says_its_reason_and_why():
    why = "they were evicted 4 min ago,\x1b when request b needed 1 page"
    evicted = {**span(0, 5, None, "evicted"), "why": why}
    shown = drawn(explained(spans=[evicted, span(5, 9, None, "not_loaded")]), 200)
    assert any(line.endswith(f"evicted: {why.replace(chr(27), '␛')}") for line in shown)
    assert any(line.endswith("faster to compute") for line in shown)


def test_a_request_is_drawn_from_its_first_token_to_its_last():
    shown = drawn(explained())
    assert shown[0].startswith("chatcmpl-000000000000000000000000  chat · cache_salt acme · ")
    assert "300 tokens were computed because" in shown[2]
    (bar,) = (line for line in shown if line.startswith("█") and len(line) == 120)
    assert (bar.count("█"), bar.count("▓"), bar.count("░")) == (59, 15, 46)
    assert "█ 400 reused   ▓ 100 loaded   ░ 312 computed" in [line.rstrip() for line in shown]
    assert [line for line in shown if " … " in line] == [
        "  0 … 400  400  █ reused from the pool",
        "400 … 500  100  ▓ reused from disk",
        "500 … 812  312  ░ new",
    ]


def test_tokens_of_a_public_prefix_are_told_from_others():
    spans = [span(0, 400, "pool", public=True), span(400, 812, "pool")]
    assert [line for line in drawn(explained(spans=spans)) if " … " in line] == [
        "  0 … 400  400  █ reused from the pool, public prefix: shared by all tenants",
        "400 … 812  412  █ reused from the pool",
    ]


def test_the_place_where_two_prompts_part_is_marked():
    text = {"given_text": "It is\n22:05:31 now", "cached_text": "It is\n21:58:02 now",
            "at_given": 7, "at_cached": 7}  # fmt: skip
    *_, given_, cached, mark = drawn(explained(text=text))
    assert (given_[14:].rstrip(), cached[14:].rstrip()) == (
        "It is␊22:05:31 now",
        "It is␊21:58:02 now",
    )
    assert (given_[mark.index("^")], cached[mark.index("^")]) == ("2", "1")
    # Where they part at different places, both are marked.
    *_, given_, mark, cached, other = drawn(explained(text={**text, "at_cached": 8}))
    assert (given_[mark.index("^")], cached[other.index("^")]) == ("2", ":")


def test_without_text_there_are_the_token_ids():
    one = span(0, 5, None, "diverged", position=41, given=[1, 2, 3], cached=[1, 2, 4])
    assert drawn(explained(spans=[one]))[-3:] == [
        "token ids around 41", " this prompt  1 2 3", "      cached  1 2 4"
    ]  # fmt: skip
    hidden = span(0, 5, None, "diverged", position=41)  # --no-text leaves them out
    assert "around" not in "\n".join(drawn(explained(spans=[hidden])))


def test_a_summary_ranks_what_costs():
    shown = [line.plain for line in draw_summary(summary(), 100)]
    assert shown[0] == (
        "the last 212 requests: 84,021 prompt tokens, 61 % reused (57 % from the pool, 4 % from "
        "disk)"
    )
    assert " 38 %   12.5 k        41  prompts of tenant acme differ at token 41 [2]" in shown
    said = summary()
    said["causes"][1]["advice"] = "Move what changes behind what stays."
    shown = [line.plain for line in draw_summary(said, 100)]
    at = next(at for at, line in enumerate(shown) if "differ at token 41" in line)
    assert shown[at + 1] == " " * 26 + "Move what changes behind what stays."
    texts = {"given_text": "It is 22:05 now", "cached_text": "It is 21:58 now",
             "at_given": 7, "at_cached": 7}  # fmt: skip
    said["causes"][1] |= {"tokens_per_hour": 1234, "text": texts}
    hourly, *both = [line.plain for line in draw_summary(said, 100)][at + 2 : at + 6]
    assert hourly.strip() == "costs 1,234 tokens an hour, by this text:"
    assert [line.strip() for line in both] == [
        "this prompt  It is 22:05 now", "cached  It is 21:58 now", "^"
    ]  # fmt: skip
    many = [{"reason": "new", "tokens": 10, "share": 0.05, "requests": 1}] * 20
    shown = [line.plain for line in draw_summary(summary(causes=many), 100)]
    assert " 40 %       80            8 more causes" in shown
    assert [line.plain for line in draw_summary({}, 100)] == [
        "the server has recorded no request yet"
    ]


def mangled(whole):
    """What a server says, with some of it replaced by anything."""
    anything = st.sampled_from(
        [None, True, -1, 10**400, float("nan"), EVIL, [], [EVIL], {EVIL: EVIL}, 7]
    )
    if isinstance(whole, dict):
        inner = st.fixed_dictionaries({name: mangled(value) for name, value in whole.items()})
    elif isinstance(whole, list):
        inner = st.tuples(*(mangled(value) for value in whole)).map(list)
    else:
        return st.one_of(st.just(whole), st.just(whole), anything)
    return st.one_of(inner, inner, inner, anything)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_answer_breaks_the_drawing_or_gets_out_of_it(data):
    text = {"given_text": EVIL + "a", "cached_text": EVIL, "at_given": 9, "at_cached": 900}
    spans = [{**span(0, 5, None, "new"), "why": "they were never seen before"}, span(5, 9, "disk")]
    said = data.draw(mangled(explained(text=text, spans=spans)))
    summed = data.draw(mangled(summary()))
    for lines in (draw(said if isinstance(said, dict) else {}, 80), draw_summary(summed, 80)):
        assert all(line.plain.isprintable() for line in lines)


# --- asking ---------------------------------------------------------------------------------------


def test_what_is_asked_for_each_way_of_asking(tmp_path, capsys, monkeypatch):
    file = tmp_path / "prompt"
    cases: list[tuple[list[str], str | None, Any]] = [
        (["--prompt", "Hello"], None, {"prompt": "Hello"}),
        (["--prompt", "[1]", "--salt", "s"], None, {"prompt": "[1]", "cache_salt": "s"}),
        (["--file", str(file)], "Hello\n", {"prompt": "Hello\n"}),
        (["--file", str(file)], "[1, 2, 3]", {"prompt": [1, 2, 3]}),
        (["--file", str(file)], "[1, 2", {"prompt": "[1, 2"}),
        (["--file", str(file)], "[]", {"prompt": "[]"}),
        (["--file", str(file)], '[{"role": "user"}]', {"messages": [{"role": "user"}]}),
        (
            ["--file", str(file)],
            '{"model": "m", "prompt": "x", "max_tokens": 7, "cache_salt": "t"}',
            {"prompt": "x", "cache_salt": "t"},
        ),
        (["--file", "-"], "from outside", {"prompt": "from outside"}),
    ]
    with told({"/kv/explain": explained(id=None)}) as server:
        for arguments, content, body in cases:
            file.write_text(content or "")
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((content or "").encode())))
            assert main(["explain", server.url, *arguments]) == 0
            assert server.asked[-1] == ("POST", "/kv/explain", body)
            assert "this prompt, if it were sent now" in capsys.readouterr().out


def test_an_id_goes_into_the_path_as_it_is(capsys):
    with told({"/kv/requests": {"requests": []}}) as server:
        for name in ("a/b?c#d", "../stats", "cmpl-1.1", "ä%2f"):
            assert main(["explain", server.url, name]) == 2
        paths = [path for path in server.paths() if "explain" in path]
    assert paths == [
        "/kv/explain/a%2Fb%3Fc%23d", "/kv/explain/..%2Fstats", "/kv/explain/cmpl-1.1",
        "/kv/explain/%C3%A4%252f",
    ]  # fmt: skip
    assert capsys.readouterr().err.count("\n") == 4


def test_the_beginning_of_an_id_is_enough(capsys):
    ids = ["chatcmpl-abc1", "chatcmpl-abd2", "cmpl-xyz", "cmpl-xyz.1", EVIL]
    answers = {
        "/kv/requests": {"requests": [request(id=one) for one in ids]},
        "/kv/explain/chatcmpl-abc1": explained(id="chatcmpl-abc1"),
        "/kv/explain/cmpl-xyz": explained(id="cmpl-xyz"),
    }
    with told(answers) as server:
        for name in ("abc", "chatcmpl-abc", "cmpl-xyz"):
            assert main(["explain", server.url, name]) == 0
        assert capsys.readouterr().out.count("chatcmpl-abc1  chat") == 2
        for name, words in (
            ("ab", "2 ids begin with ab: write more"),
            ("q", "nothing at this"),
        ):
            assert main(["explain", server.url, name]) == 2
            assert words in capsys.readouterr().err


def test_json_is_what_the_server_says(capsys):
    with told({"/kv/summary": summary(), "/kv/explain/x": explained()}) as server:
        assert main(["explain", server.url, "--json", "--last", "30"]) == 0
        assert server.paths() == ["/kv/summary?last=30"]
        assert json.loads(capsys.readouterr().out) == summary()
        assert main(["explain", server.url, "x", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == explained()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--prompt", "y"], "exclude each other"),
        (["--prompt", "y", "--file", "z"], "exclude each other"),
        (["x", "--salt", "s"], "--salt needs --prompt"),
        (["x", "--last", "3"], "--last is for a summary"),
        (["--last", "0"], "--last is 0"),
        (["--last", "1001"], "--last is 1001"),
        ([" "], "the ID is empty"),
        (["--file", "/nowhere/at/all"], "cannot be read as text"),
        (["x"], "no server listens"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(["explain", "127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_an_empty_file_and_one_that_is_too_large(tmp_path, capsys):
    file = tmp_path / "prompt"
    for content, words in (
        (b"", "is empty"),
        (b"x" * ((8 << 20) + 1), "more than 8,388,608 bytes"),
    ):
        file.write_bytes(content)
        assert main(["explain", "127.0.0.1:1", "--file", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_hostile_text_is_printed_as_text(capsys):
    said = explained(
        id=EVIL, sentence=EVIL, endpoint=EVIL, session=EVIL, cache_salt=EVIL, reused={EVIL: 5},
        spans=[span(0, 5, EVIL), span(5, 9, None, EVIL, **{EVIL: EVIL})],
        text={"given_text": EVIL, "cached_text": EVIL, "at_given": 3, "at_cached": 3},
    )  # fmt: skip
    with told({"/kv/explain/x": said}) as server:
        assert main(["explain", server.url, "x"]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert "␛]52;c" in out
    assert "\\u202eevil" in out
    assert "[red]x[/red]:smile:" in out


# --- a real server --------------------------------------------------------------------------------


@pytest.mark.model
def test_a_timestamp_in_the_system_prompt_is_found(capsys, tmp_path):
    with seen() as url:
        chat(url, "22:05:31", "What does textwrap.dedent do?")
        name = chat(url, "21:58:02", "What does textwrap.dedent do?")
        assert main(["explain", url, name]) == 0
        out = capsys.readouterr().out
        assert "differs: they differ from request" in out
        lines = out.splitlines()
        at = lines.index("the first difference")
        given_, cached, mark = lines[at + 1 : at + 4]
        assert "It is 21:58:02." in given_
        assert "It is 22:05:31." in cached
        place = mark.index("^")
        assert given_[:place][14:] == cached[:place][14:]
        assert given_[place:] != cached[place:]
        # The same by the beginning of its id, and for programs.
        assert main(["explain", url, name.partition("-")[2][:12], "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["id"] == name
        assert (
            sum(said["reused"].values()) + sum(said["computed"].values()) == said["prompt_tokens"]
        )

        # Many more of that kind are the first of all causes.
        for second in range(10, 22):
            chat(url, f"21:58:{second}", "What does textwrap.dedent do?")
        assert main(["explain", url]) == 0
        out = capsys.readouterr().out
        assert out.startswith("the last 14 requests: ")
        first = out.splitlines()[6]
        assert "differ at token" in first

        # A prompt that was cached, as if it came now: all but its last token.
        file = tmp_path / "request.json"
        file.write_text(json.dumps({"prompt": "Return a copy of the list"}))
        assert main(["explain", url, "--file", str(file)]) == 0
        assert "never seen before" in capsys.readouterr().out
        assert main(["explain", url, "--prompt", "x" * 100_000]) == 2
        assert "tokens" in capsys.readouterr().err


@pytest.mark.model
def test_a_real_server_asks_for_its_key(capsys, monkeypatch):
    with seen(api_key="secret") as url:
        assert main(["explain", url]) == 2
        assert "needs an API key" in capsys.readouterr().err
        monkeypatch.setenv("KVKEEP_API_KEY", "wrong")
        assert main(["explain", url]) == 2
        assert "needs another API key" in capsys.readouterr().err


@pytest.mark.model
def test_what_clients_send_to_a_real_server_is_text_in_all_three(capsys):
    evil = EVIL.replace("\ud800", "")  # no client could send half a pair
    with seen() as url:
        for question in ("one", "two"):
            fields = {"cache_salt": evil, "kvkeep": {"session": evil}}
            name = chat(url, evil, f"{evil} {question}", **fields)
        for arguments in (
            ["top", url, "--once"],
            ["explain", url],
            ["explain", url, name],
            ["tree", url],
        ):
            assert main(arguments) == 0
            out = capsys.readouterr().out
            assert all(line.isprintable() for line in out.splitlines())
            assert "[red]" in out or "]52;c" in out or "evil" in out


@pytest.mark.model
def test_top_shows_what_a_real_server_does(capsys):
    with seen() as url:
        for _ in range(3):
            name = chat(url, "now", "What does heapq.merge do?", cache_salt="acme")
        assert main(["top", url, "--once"]) == 0
        out = capsys.readouterr().out
        assert main(["top", url, "--once", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
    totals = said["live"]["totals"]
    assert totals["requests"] == 3
    rate = round(100 * totals["cached_tokens"] / totals["prompt_tokens"])
    assert f"{rate} % so far" in out
    assert " acme " in out
    assert name.partition("-")[2][:10] in out
    assert said["requests"][0]["id"] == name
