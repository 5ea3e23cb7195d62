"""The container files: what they copy, who they run as, and what they leave out."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from urllib.parse import urlsplit

import pytest
from deployed import CONTAINER, ROOT, instructions, last, read_config, tool

OURS = CONTAINER / "Containerfile"
VLLM = CONTAINER / "Containerfile.vllm"
CONFIG = read_config(CONTAINER / "kvkeep.toml")
both = pytest.mark.parametrize("path", [OURS, VLLM], ids=lambda path: path.name)


def runs(path):
    return [rest for word, rest in instructions(path) if word == "RUN"]


@both
def test_hadolint_finds_nothing(path):
    done = subprocess.run(
        [tool("hadolint"), "--no-color", str(path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@both
def test_bases_are_versions_that_a_variable_gives(path):
    found = instructions(path)
    given = dict(rest.split("=", 1) for word, rest in found if word == "ARG")
    stages = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert len(stages) == 2
    for stage in stages:
        name = re.fullmatch(r"\$\{(\w+)\}", stage)
        assert name, f"{stage} is no variable"
        assert re.fullmatch(r"docker\.io/[\w/-]+:v?\d+\.\d+\.\d+[\w.-]*", given[name[1]])


@both
def test_what_is_copied_is_there_and_not_ignored(path):
    ignored = (ROOT / ".containerignore").read_text("utf-8").split()
    taken = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = [rest.split()[:-1] for word, rest in instructions(path) if word == "COPY"]
    sources = [one for words in copied if "--from" not in words[0] for one in words]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in taken, source


def test_both_kinds_of_builders_ignore_the_same():
    assert (ROOT / ".dockerignore").resolve() == ROOT / ".containerignore"


def test_the_package_is_built_from_what_is_copied():
    """Everything that its metadata names is in the context."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    copied = {
        one for path in (OURS, VLLM) for word, rest in instructions(path)
        if word == "COPY" for one in rest.split()[:-1]
    }  # fmt: skip
    shown = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    assert all(part["path"] in copied for part in shown)
    for pattern in project["project"]["license-files"]:
        assert pattern in copied or pattern.startswith("src/")
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/kvkeep"]


@both
def test_extras_exist(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    told = dict(rest.split("=", 1) for word, rest in instructions(path) if word == "ARG")
    text = " ".join(runs(path)).replace("${EXTRAS}", told.get("EXTRAS", ""))
    named = re.findall(r"whl\)\[([\w,]+)\]", text)
    assert len(named) == 1
    assert set(named[0].split(",")) <= set(project["optional-dependencies"])


@both
def test_no_cache_of_pip_stays(path):
    text = path.read_text("utf-8")
    installs = [one for one in runs(path) if "pip install" in one or "pip wheel" in one]
    assert installs
    assert "PIP_NO_CACHE_DIR=1" in text or all("--no-cache-dir" in one for one in installs)


def test_it_runs_as_a_user_with_a_number():
    user, group = last(OURS, "USER").split(":")
    assert int(user) == int(group) == 10001
    names = [word for word, _ in instructions(OURS)]
    final = names[len(names) - names[::-1].index("FROM") :]
    assert "RUN" not in final[final.index("USER") :]


def test_it_drains_on_the_signal_that_it_gets():
    for path in (OURS, VLLM):
        assert last(path, "STOPSIGNAL") == "SIGTERM"
    # Not by a shell, which would not pass the signal on.
    assert json.loads(last(OURS, "ENTRYPOINT")) == ["kvkeep"]


def test_ports_and_the_health_check_are_those_of_the_configuration():
    exposed = {int(port) for port in last(OURS, "EXPOSE").split()}
    assert {CONFIG["serve"]["port"], CONFIG["route"]["port"]} <= exposed
    asked = json.loads(last(OURS, "HEALTHCHECK").partition("CMD ")[2])
    (address,) = re.findall(r"'(http://[^']+)'", asked[-1])
    assert urlsplit(address).port == CONFIG["serve"]["port"]
    assert urlsplit(address).path == "/livez"
    compile(asked[-1], "the health check", "exec")


def test_state_is_in_the_volume():
    volume = last(OURS, "VOLUME")
    environment = last(OURS, "ENV")
    assert f"XDG_CACHE_HOME={volume}/cache" in environment
    assert f"HOME={volume} " in environment
    disk = CONFIG["serve"]["tier"][-1]
    assert urlsplit(disk).path.startswith(f"{volume}/")
    assert f"KVKEEP_CONFIG={last(OURS, 'COPY').split()[-1]} " in environment


def test_the_script_that_builds_it_is_one():
    script = ROOT / "scripts/build_image.sh"
    done = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in re.findall(r"deploy/container/Containerfile|\.containerignore", script.read_text()):
        assert (ROOT / path).is_file()
