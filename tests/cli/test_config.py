"""One file for `kvkeep serve` and `kvkeep route`, and `kvkeep config`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.cli import _parser, main
from kvkeep.cli.config import _parsers
from kvkeep.cli.settings import ConfigParser
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

PARSERS = _parsers()
EXAMPLE = Path(__file__).parents[2] / "examples" / "kvkeep.toml"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVKEEP_CONFIG", "KVKEEP_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "kvkeep.toml"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return write


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(words)


def refused(capsys: Any, *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("kvkeep: error: ")
    return str(line)


# --- values ------------------------------------------------------------------------------------


def test_values_of_a_file_are_those_of_the_command_line(file):
    path = file(
        "[serve]\nport = 9\nmemory = '1GiB'\nmax_running = '4k'\nrequest-timeout = '5m'\n"
        "drain-timeout = 1.5\ntier = ['memory://1GiB', 'file:///x']\nno-text = true\n"
        "eviction = 'returns'\ncost = '/c.json'\n"
    )
    args = parsed("serve", "--config", path)
    words = (
        "--port 9 --memory 1GiB --max-running 4k --request-timeout 5m --drain-timeout 1.5 "
        "--tier memory://1GiB --tier file:///x --no-text --eviction returns "
        "--cost /c.json"
    )
    same = parsed("serve", *words.split())
    assert vars(args) == vars(same)


def test_an_empty_file_changes_nothing(file):
    path = file("[serve]\n[route]\n")
    for command in (["serve"], ["route", "--instances", "http://a:1"]):
        assert vars(parsed(*command, "--config", path)) == vars(parsed(*command))


def test_the_command_line_goes_first(file):
    path = file("[serve]\nport = 9\ntier = ['file:///x', 'file:///y']\nshare = ['a=1']\n")
    args = parsed("serve", "--config", path, "--port", "7", "--tier", "memory://1MiB")
    assert (args.port, args.tier, args.share) == (7, ["memory://1MiB"], ["a=1"])


def test_the_environment_names_a_file(file, monkeypatch):
    monkeypatch.setenv("KVKEEP_CONFIG", file("[route]\ninstances = ['http://a:1', 'http://b:2']\n"))
    assert parsed("route").instances == "http://a:1,http://b:2"
    assert parsed("route", "--instances", "http://c:3").instances == "http://c:3"


def test_what_is_required_may_be_in_the_file(file, capsys):
    parser = ConfigParser(prog="x")
    parser.add_config("route")
    parser.add_argument("--port", required=True)
    with pytest.raises(InvalidValue, match="arguments are required: --port; x --help lists all"):
        parser.parse_args(["--config", file("[route]\n")])
    assert parser.parse_args(["--config", file("[route]\nport = '1'\n")]).port == "1"
    path = file("[route]\nport = 1\n")
    assert "--instances" in refused(capsys, "route", "--config", path)
    assert parsed("route", "--config", file("[route]\ninstances = 'http://a:1'\n")).instances


@pytest.mark.parametrize(
    ("text", "words", "wanted"),
    [
        ("tier = ['memory://1GiB']", "--no-store", {"tier": [], "no_store": True}),
        ("no-store = true", "--tier memory://1GiB", {"tier": ["memory://1GiB"], "no_store": False}),
        ("no-store = false\ntier = ['memory://1GiB']", "", {"tier": ["memory://1GiB"]}),
        ("api-key = 'k'", "--api-key-file f", {"api_key": None, "api_key_file": Path("f")}),
        ("api-key-file = 'f'", "--api-key k", {"api_key": "k", "api_key_file": None}),
    ],
)
def test_an_option_turns_off_its_rival_in_the_file(text, words, wanted, file):
    args = parsed("serve", "--config", file(f"[serve]\n{text}\n"), *words.split())
    assert {name: getattr(args, name) for name in wanted} == wanted


def test_the_key_in_the_environment_goes_before_the_file(file, monkeypatch):
    path = file("[serve]\napi-key-file = '/nowhere'\n")
    assert parsed("serve", "--config", path).api_key_file == Path("/nowhere")
    monkeypatch.setenv("KVKEEP_API_KEY", "k")
    args = parsed("serve", "--config", path)
    assert (args.api_key, args.api_key_file) == (None, None), "the command reads the variable"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "[serve] has no option prot; did you mean 'port'?"),
        ("xyzzy = 1", "has no option xyzzy; kvkeep serve --help lists all"),
        ("config = 'x'", "has no option config"),
        ("port = 'many'", "port: 'many' is no count; write a whole number"),
        ("port = true", "port: True is given; a number or text is needed"),
        ("port = [1]", "port: [1] is given; a number or text is needed"),
        ("memory = '24G'", "memory: '24G' is no amount of memory: G has two meanings"),
        ("no-text = 'yes'", "no-text: 'yes' is given; true or false is needed"),
        ("tier = 'memory://1GiB'", "tier: 'memory://1GiB' is given; a list is needed"),
        ("tier = [1]", "tier: 1 is given; text is needed"),
        ("name = 1", "name: 1 is given; text is needed"),
        (r'model = "a\u0000b"', r"model: 'a\x00b' is given; text without NUL characters is needed"),
        ("eviction = 'lruu'", "eviction: 'lruu' is none of lru, "),
        ("request-timeout = 'soon'", "request-timeout: 'soon' is no time; write seconds"),
        ("api-key = 12345", "api-key: '***' is given; text is needed"),
    ],
)
def test_a_wrong_value_names_its_line(text, said, file, capsys):
    path = file(f"# settings\n[serve]\n{text}\n")
    line = refused(capsys, "serve", "--config", path)
    assert f"{path}:3: " in line
    assert said in line
    assert main(["config", "check", path]) == 2
    assert capsys.readouterr().err == line + "\n"


def test_a_file_that_is_not_there(capsys, monkeypatch):
    assert "cannot read settings from /no/file: No such file" in refused(
        capsys, "serve", "--config", "/no/file"
    )
    monkeypatch.setenv("KVKEEP_CONFIG", "/other/file")
    assert "cannot read settings from /other/file" in refused(capsys, "route")


def values_for(action: argparse.Action) -> st.SearchStrategy[tuple[object, list[str]]]:
    """A value in a file, and the same as words."""
    option = action.option_strings[0]
    if action.nargs == 0:
        return st.just((True, [option]))
    if action.choices is not None:
        one = st.sampled_from(list(action.choices))
        return one.map(lambda text: (text, [option, text]))
    if isinstance(action, argparse._AppendAction):
        some = st.lists(st.sampled_from(["a=1", "memory://1MiB", "x"]), min_size=1)
        return some.map(lambda many: (many, [word for one in many for word in (option, one)]))
    if action.type in {None, str, Path}:
        return st.sampled_from(["x", "/a b", "é"]).map(lambda text: (text, [f"{option}={text}"]))
    return st.integers(1, 9999).map(lambda count: (count, [option, str(count)]))


@settings(deadline=None, max_examples=30)
@given(st.data(), st.sampled_from(["serve", "route"]))
def test_any_options_mean_the_same_in_a_file(tmp_path_factory, data, section):
    parser = PARSERS[section]
    actions = {one.dest: one for one in parser.described()}
    for rivals in ("api_key", "cost", "no_store", "no_reuse"):
        actions.pop(rivals, None)
    chosen = data.draw(st.lists(st.sampled_from(sorted(actions)), unique=True, max_size=8))
    drawn = {dest: data.draw(values_for(actions[dest])) for dest in chosen}
    lines = [
        f"{dest} = {json.dumps(value, ensure_ascii=False)}" for dest, (value, _) in drawn.items()
    ]
    path = tmp_path_factory.mktemp("any") / "kvkeep.toml"
    path.write_text("\n".join([f"[{section}]", *lines]), encoding="utf-8")
    path.chmod(0o600)
    more = [] if section == "serve" or "instances" in chosen else ["--instances", "http://a:1"]
    words = [word for _, words in drawn.values() for word in words]
    from_file = vars(parser.parse_args([*more, "--config", str(path)]))
    assert from_file == vars(parser.parse_args([*more, *words]))


# --- kvkeep config -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("config check", "FILE"),
        ("config check /no/file", "/no/file"),
        ("config", "ACTION"),
    ],
)
def test_mistakes_of_the_command(words, said, capsys):
    assert said in refused(capsys, *words.split())


def test_check_counts_and_finds_all_mistakes(file, capsys):
    assert main(["config", "check", file("[serve]\nport = 1\n[route]\n")]) == 0
    assert "1 option in [serve], 0 options in [route]; all are right" in capsys.readouterr().out
    path = file("[serve]\nprot = 1\nport = 'x'\n[route]\nprot = 1\nport = 'x'\ntries = 'x'\n")
    assert main(["config", "check", path]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(f"{path}:")[2].partition(":")[0] for line in lines] == list("23567")
    assert "did you mean 'port'?" in lines[2]
    assert main(["config", "check", path, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["mistakes"]) == 5


def test_check_judges_as_the_commands_do(file, capsys):
    """Ranges, contradictions and URLs; each mistake by its line, and nothing that is right."""
    wrong = {
        "serve": [
            "port = 70000", "request-timeout = 0", "api-key = ''",
            "max-running = 0", "load-timeout = 'inf'", "tier = ['ftp://x']", "page-size = 0",
            "block-tokens = 0", "share = ['a=-1']", "tiering = 'x'",
        ],
        "route": [
            "port = -1", "idle-timeout = 'nan'", "ranks = 0",
            "instances = ['http://a:1', 'http://a:1']", "discover = ['http://a']",
            "replay = 'tcp://127.0.0.1:1'",
        ],
    }  # fmt: skip
    lines = [
        row for section, rows in wrong.items()
        for row in (f"[{section}]", "host = '127.0.0.1'", *rows, "drain-timeout = 5")
    ]  # fmt: skip
    path = file("\n".join(lines))
    assert main(["config", "check", path]) == 2
    found = [line.partition(f"{path}:")[2].partition(":") for line in
             capsys.readouterr().err.splitlines()]  # fmt: skip
    said = {lines[int(number) - 1] for number, _, _ in found}
    assert said == {*wrong["serve"], *wrong["route"]}
    assert len(found) == len(wrong["serve"]) + len(wrong["route"])


def test_check_leaves_to_the_command_line_what_a_file_lacks(file, capsys, monkeypatch):
    monkeypatch.setenv("KVKEEP_API_KEY", "")
    text = "[serve]\napi-key-file = '/no/such/key'\n[route]\nport = 8080\n"
    assert main(["config", "check", file(text)]) == 0, capsys.readouterr().err


def test_a_secret_that_all_can_read_is_warned_of(file, capsys):
    path = Path(file("[serve]\napi-key = 'hunter2'\n"))
    path.chmod(0o644)
    assert main(["config", "check", str(path)]) == 0
    assert "every user of this machine can read it" in capsys.readouterr().err
    parsed("serve", "--config", str(path))
    captured = capsys.readouterr()
    assert captured.err.startswith("kvkeep: warning: ")
    assert "hunter2" not in captured.err + captured.out


def test_the_shipped_example_is_right(capsys, tmp_path):
    assert main(["config", "check", str(EXAMPLE)]) == 0, capsys.readouterr().err
    assert parsed("route", "--config", str(EXAMPLE)).port == 8080
    assert parsed("serve", "--config", str(EXAMPLE)).request_timeout == 600
