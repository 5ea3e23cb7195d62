"""Typical mistakes with every command: one line, exit code 2, and what to do instead.

The commands run as a user runs them: with real files, and with a port that nobody listens on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvkeep.cli import _parser, main
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files that commands need, and a port that nobody listens on."""
    monkeypatch.delenv("KVKEEP_CONFIG", raising=False)
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").write_text("a prompt\n")
    rows = [{"kvkeep_trace": 1, "name": "t", "unit_tokens": 16}]
    rows += [{"time": 0.0, "tokens": 16, "output_tokens": 1, "units": "00" * 8}]
    (tmp_path / "trace").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dead = f"http://127.0.0.1:{free_port()}"
    return {
        "tmp": str(tmp_path), "dead": dead, "prompts": str(tmp_path / "prompts"),
        "trace": str(tmp_path / "trace"),
    }  # fmt: skip


def refused(capsys: Any, words: list[str]) -> str:
    """Run a command that is refused; return its line."""
    assert main(words) == 2, words
    captured = capsys.readouterr()
    assert captured.out == "", words
    (line,) = captured.err.splitlines()
    assert line.startswith("kvkeep: error: "), words
    assert "Traceback" not in line
    assert line.count("[Errno") == 0, words
    assert len(line) < 1000, words
    return str(line)


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield from below("", _parser())


def below(name: str, parser: Any) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if name and not (inner and inner[0].required):
        yield name, parser
    for one in inner:
        for word, command in one.choices.items():
            yield from below(f"{name} {word}".strip(), command)


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelt_option_is_named_with_the_right_one(name, capsys):
    parser = COMMANDS[name]
    option = max((one for a in parser._actions for one in a.option_strings), key=len)
    wrong = option[:-3] + option[-2] + option[-3] + option[-1] + "x"
    line = refused(capsys, [*name.split(), wrong, "1"])
    assert f"there is no option {wrong}" in line
    assert f"'{option}'" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_without_its_value(name, capsys):
    parser = COMMANDS[name]
    taking = [a.option_strings[0] for a in parser._actions if a.option_strings and a.nargs is None]
    if taking:
        line = refused(capsys, [*name.split(), taking[0]])
        assert f"argument {taking[0]}: expected one argument" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_default_is_told_once_and_as_it_can_be_typed(name):
    for action in COMMANDS[name]._actions:
        text = action.help or ""
        assert text.count("(default:") + text.count("; default:") <= 1, text
        if action.dest == "port":
            assert f"(default: {action.default})" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_into_a_terminal(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, COMMANDS[name].format_help().splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_count_size_or_time_names_its_option(name, capsys):
    parser = COMMANDS[name]
    for action in parser._actions:
        if getattr(action.type, "__name__", "") in {"count", "byte_size", "seconds", "number"}:
            option = action.option_strings[0]
            line = refused(capsys, [*name.split(), option, "lots"])
            assert f"argument {option}: 'lots' is no " in line
            assert "write" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", ["COMMAND", "--help lists all"]),
        ("serv", ["'serv' is none of serve, ", "did you mean 'serve'?"]),
        ("--versoin", ["there is no option --versoin; did you mean '--version'?"]),
        ("store vrify file:///x", ["'vrify' is none of ls, verify", "did you mean 'verify'?"]),
        ("store gc file:///x --older 7", ["7d"]),
        ("replay {trace} --polciy lru", ["--polciy", "did you mean '--policy'?"]),
        ("replay --polciy lru {trace} --capacity 1k", ["--polciy", "did you mean '--policy'?"]),
        ("serve --polciy lru", ["--polciy", "did you mean '--eviction'?"]),
        ("serve --policy lru", ["--policy", "did you mean '--eviction'?"]),
        ("replay {trace} --eviction lru", ["--eviction", "did you mean '--policy'?"]),
        ("replay {trace}", ["--capacity", "kvkeep replay --help"]),
        ("replay {trace} --capacity 1k --policy lruu", ["'lruu'", "did you mean 'lru'?"]),
        ("replay {trace} --capacity 1X", ["'1X'", "40GiB"]),
        ("replay /no/trace --capacity 1k", ["/no/trace", "No such file"]),
        ("replay {prompts} --capacity 1k", ["{prompts}"]),
        ("plan /no/trace --memory 1k", ["/no/trace", "No such file"]),
        ("trace info /no/trace", ["/no/trace", "No such file"]),
        ("trace info {trace} --format mooncak", ["'mooncak'", "did you mean 'mooncake'?"]),
        ("trace convert {trace} {trace}", ["{trace}", "exists already"]),
        ("trace generate chatt --out x", ["'chatt'", "did you mean 'chat'?"]),
        ("trace generate chat --out /no/where/x", ["/no/where/x"]),
        ("serve --port 0 --dtype flaot16", ["flaot16", "did you mean 'float16'?"]),
        ("demo --memory 24G", ["argument --memory: '24G'", "24GiB", "24GB"]),
        ("size --memory 24GB --model /no/model", ["/no/model"]),
        ("size", ["--memory"]),
        ("serve --tier valkye://h --port 0", ["valkye", "did you mean 'valkey'?"]),
        ("serve --tier file://{tmp}/t?szie=1GiB --port 0", ["szie", "did you mean 'size'?"]),
        ("serve --tier memory://1GiB?policy=lruu --port 0", ["lruu", "did you mean 'lru'?"]),
        ("serve --tier file://{tmp}/t?size=1G --port 0", ["size=1G", "1GiB", "1GB"]),
        ("serve --tiering inclusiv --port 0", ["'inclusiv'", "did you mean 'inclusive'?"]),
        ("serve --eviction lruu", ["argument --eviction: 'lruu'", "did you mean 'lru'?"]),
        ("serve --api-key-file /no/key", ["/no/key", "No such file"]),
        ("serve --public-prefixes /no/file --port 0", ["/no/file", "No such file"]),
        ("serve --port 99999", ["99999"]),
        ("serve --host no.such.host.invalid --port 0", ["no.such.host.invalid"]),
        ("route", ["--instances"]),
        ("route http://a:1", ["http://a:1", "kvkeep route --help"]),
        ("route --instances nonsense", ["nonsense"]),
        ("top nonsense://x", ["nonsense://x", "http://host:port"]),
        ("top {dead}", ["{dead}"]),
        ("explain {dead} some-id", ["{dead}"]),
        ("explain {dead} --file /no/file", ["/no/file", "No such file"]),
        ("tree /no/file", ["/no/file", "No such file"]),
        ("tree {dead}", ["{dead}"]),
        ("store ls /var/lib/kvkeep", ["file:///path"]),
        ("store ls file:///no/where", ["/no/where"]),
        ("store ls flie:///x", ["flie", "did you mean 'file'?"]),
        ("config check {trace}", ["{trace}", "no TOML"]),
    ],
)  # fmt: skip
def test_typical_mistakes(words, says, places, capsys):
    line = refused(capsys, shlex.split(words.format(**places)))
    for part in says:
        assert part.format(**places) in line


@pytest.mark.parametrize(
    "words",
    [
        "demo --model", "serve --port 0 --model",
        "size --memory 1GiB --model",
        "route --instances http://127.0.0.1:9 --port 0 --model",
        "plan {trace} --memory 1GiB --model", "replay {trace} --capacity 1GiB --model",
    ],
)  # fmt: skip
def test_a_hub_id_says_how_to_get_the_files(words, places, capsys):
    name = "meta-llama/Llama-3.1-8B"
    line = refused(capsys, [*shlex.split(words.format(**places)), name])
    assert f"hf download {name} --local-dir Llama-3.1-8B" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "words",
    ["demo", "serve --port 0"],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there(words, device, places, capsys):
    line = refused(capsys, [*shlex.split(words.format(**places)), "--device", device])
    assert f"device '{device}' needs a" in line
    assert "give auto or cpu" in line


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(places, capsys, tmp_path):
    (tmp_path / "trace").chmod(0)
    assert "Permission denied" in refused(capsys, ["trace", "info", places["trace"]])


def test_fields_of_a_trace(places, capsys, tmp_path):
    lines = (tmp_path / "trace").read_text().splitlines()
    (tmp_path / "trace").write_text(lines[0] + "\n" + lines[1].replace("units", "untis") + "\n")
    line = refused(capsys, ["trace", "info", places["trace"]])
    assert "line 2: units is missing; 'untis' is no field" in line


def parsed(words: str) -> argparse.Namespace:
    return _parser().parse_args(words.split())


def test_times_and_counts_take_units():
    args = parsed(
        "serve --request-timeout 10m --drain-timeout 500ms --load-timeout 2 --max-waiting 1K "
        "--memory 2gb"
    )
    assert (args.request_timeout, args.drain_timeout, args.load_timeout) == (600, 0.5, 2)
    assert (args.max_waiting, args.memory) == (1000, 2 * 10**9)
    args = parsed("store gc file:///x --older 7d --size 2gib")
    assert (args.older, args.size) == (7 * 86_400, 2 << 30)
