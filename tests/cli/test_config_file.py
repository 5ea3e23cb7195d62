"""A file of settings: what it may have, and the lines that its mistakes are on."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.cli.config_file import SECTIONS, ConfigFile, is_secret, masked
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path


def read(tmp_path: Path, text: str) -> ConfigFile:
    file = tmp_path / "kvkeep.toml"
    file.write_text(text, encoding="utf-8")
    return ConfigFile.read(file)


def test_values_have_their_names_and_lines(tmp_path):
    file = read(
        tmp_path,
        '# first\n[serve]\nport = 1\n"log-level" = "error"\ntier = [\n  "port = 9",\n]\n'
        'name = """\nport = 5\n"""\n\n[ route ]\nport = 2\nusage = true\n',
    )
    assert file.sections == ("serve", "route")
    found = {name: (one.key, one.value, one.where) for name, one in file.section("serve").items()}
    path = tmp_path / "kvkeep.toml"
    assert found == {
        "port": ("port", 1, f"{path}:3"),
        "log_level": ("log-level", "error", f"{path}:4"),
        "tier": ("tier", ["port = 9"], f"{path}:5"),
        "name": ("name", "port = 5\n", f"{path}:8"),
    }
    assert file.section("route")["port"].where == f"{path}:13"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("serve.port = 1\n", 1),
        ("\nserve = {port = 1}\n", 2),
        ("'serve' . port = 1", 1),
        ("[route]\nport = 2\n[serve] # here\n  port=1", 4),
        ("[serve]\r\nhost = 'x'\r\nport = 1\r\n", 3),
        ("[serve]\nname = '''\n[serve]\nport = 3\n'''\nport = 1", 6),
    ],
)
def test_other_ways_to_write_it(text, line, tmp_path):
    one = read(tmp_path, text).section("serve")["port"]
    assert (one.value, one.where.rpartition(":")[2]) == (1, str(line))


@given(
    st.lists(
        st.sampled_from(["", "# port = 1", "x = '''\nport = 2\n'''", "y = [\n 1,\n]", 'z = "a"']),
        unique=True,
    ),
    st.lists(st.sampled_from(["[route]\nport = 3", "# [serve]"]), unique=True),
)
def test_the_line_is_found_behind_anything(tmp_path_factory, inside, before):
    text = "\n".join([*before, "[serve]", *inside, "port = 1"])
    wanted = text.count("\n") + 1
    found = read(tmp_path_factory.mktemp("lines"), text).section("serve")["port"]
    assert found.where.endswith(f":{wanted}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serv]\n", r":1: there is no \[serv\].*; did you mean 'serve'\?"),
        ("\nport = 1\n", r":2: there is no port; options are in the sections \[serve\]"),
        ("serve = 1", r":1: serve is 1; write \[serve\]"),
        ("[serve\n", r"is no TOML: Expected .*line 1"),
        ("[serve]\nx = 1\nx = 2\n", r"is no TOML: .*line 3"),
        ("x = " + "[" * 5000, "is no TOML"),
    ],
)
def test_mistakes_name_file_and_line(text, said, tmp_path):
    with pytest.raises(InvalidValue, match=said) as wrong:
        read(tmp_path, text)
    assert "\n" not in str(wrong.value)
    assert str(tmp_path) in str(wrong.value)


def test_a_name_given_twice(tmp_path):
    file = read(tmp_path, "[serve]\nlog-level = 'info'\nlog_level = 'error'\n")
    with pytest.raises(InvalidValue, match=":3: log_level is given twice, as log-level too"):
        file.section("serve")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidValue, match=r"cannot read settings from .*: No such file") as wrong:
        ConfigFile.read(tmp_path / "none.toml")
    assert "Errno" not in str(wrong.value)
    with pytest.raises(InvalidValue, match="Is a directory"):
        ConfigFile.read(tmp_path)
    (tmp_path / "latin").write_bytes(b"# \xff\n")
    with pytest.raises(InvalidValue, match="no UTF-8 text, at byte 2"):
        ConfigFile.read(tmp_path / "latin")
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(InvalidValue, match="larger than 1 MiB"):
        ConfigFile.read(tmp_path / "large")
    (tmp_path / "number.toml").write_text("[serve]\nport = " + "9" * 5000)
    with pytest.raises(InvalidValue, match=r"number\.toml is no TOML"):
        ConfigFile.read(tmp_path / "number.toml")
    (tmp_path / "many.toml").write_text("[serve]\n" + "".join(f"k{n} = 1\n" for n in range(1001)))
    with pytest.raises(InvalidValue, match=r"1001 options in \[serve\]: it is no file of sett"):
        ConfigFile.read(tmp_path / "many.toml")
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[serve]\n")
    assert ConfigFile.read(tmp_path / "bom.toml").sections == ("serve",)


def test_what_is_secret():
    assert is_secret("api-key")
    assert not is_secret("api-key-file")
    assert not is_secret("port")
    assert masked("api-key", "hunter2") == "***"
    assert masked("api-key", "") == ""
    tiers = ["valkey://me:pa/ss@host:6379/x?y=z", "file:///x?size=1GiB"]
    assert masked("tier", ["valkey://me:pass@host:6379?y=z", tiers[1]]) == [
        "valkey://me:***@host:6379?y=z", tiers[1],
    ]  # fmt: skip


@pytest.mark.parametrize("password", ["pa/ss", "p@ss", "p a ss", "p?a#ss", "p\nss", "a:b@c:d"])
def test_no_part_of_a_password_is_shown(password):
    url = f"valkey://me:{password}@host:6379/x?y=z"
    assert masked("tier", url) == "valkey://me:***@host:6379/x?y=z"
    assert masked("tier", {"url": [url]}) == {"url": ["valkey://me:***@host:6379/x?y=z"]}


@pytest.mark.skipif(os.name != "posix", reason="access rights")
@pytest.mark.parametrize(
    ("text", "mode", "warned"),
    [
        ("[serve]\napi-key = 'hunter2'", 0o644, "api-key"),
        ("[serve]\napi-key = 'hunter2'", 0o640, None),
        ("[serve]\napi-key-file = '/k'", 0o644, None),
        ("[serve]\ntier = ['valkey://me:hunter2@h:1']", 0o604, "tier"),
        ("[serve]\ntier = ['valkey://h:1']", 0o644, None),
    ],
)
def test_a_secret_that_everyone_can_read(text, mode, warned, tmp_path):
    file = read(tmp_path, text)
    file.path.chmod(mode)
    warning = file.warning()
    assert (warning is None) == (warned is None)
    if warning is not None:
        assert re.search(rf"a secret \({warned}\).*chmod 600", warning)
        assert "hunter2" not in warning


def test_sections_are_those_that_are_documented():
    assert SECTIONS == ("serve", "route")
