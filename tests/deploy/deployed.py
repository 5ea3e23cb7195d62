"""What `deploy` has: manifests, compose file, units, container files, and their commands."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose"
SYSTEMD = DEPLOY / "systemd"
CONTAINER = DEPLOY / "container"
UNITS = sorted(SYSTEMD.glob("*.service"))
# What of a shutdown is beside draining and writing KV: the last bytes of answers, the interpreter.
ENDING_S = 5
FLUSH_S = 10  # until the KV of what was computed is in the tiers
VARIANTS = ("serve", "vllm")  # folders that are complete with `base`


class Command(NamedTuple):
    """A command of kvkeep's that something here runs, and the file that it reads there."""

    where: str
    words: list[str]
    config: Path

    @property
    def name(self) -> str:
        return self.words[0]

    @property
    def section(self) -> dict[str, Any]:
        return read_config(self.config)[self.name]


def tool(name: str) -> str:
    """The path of a program, beside this Python or in PATH; without it the test is skipped."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    found = beside or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} is installed")
    return found


def read_yaml(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(path.read_text("utf-8"))


# --- kubernetes ------------------------------------------------------------------------------


def manifests(folder: str) -> list[dict[str, Any]]:
    """Every object in a folder of `deploy/kubernetes`."""
    files = sorted((KUBERNETES / folder).glob("*.yaml"))
    return [one for file in files if file.name != "kustomization.yaml" for one in read_yaml(file)]


def deployed(variant: str) -> list[dict[str, Any]]:
    """Every object of a variant, those of `base` included."""
    return manifests("base") + manifests(variant)


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] in kinds]


def workloads(variant: str) -> list[dict[str, Any]]:
    return of_kind(deployed(variant), "Deployment", "StatefulSet")


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(workload)["containers"]
    return only


def pod_labels(workload: dict[str, Any]) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def component(workload: dict[str, Any]) -> str:
    return pod_labels(workload)["app.kubernetes.io/component"]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.items())


def container_ports(workload: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in container(workload)["ports"]}


# --- compose ---------------------------------------------------------------------------------


@cache
def compose() -> dict[str, Any]:
    (only,) = read_yaml(COMPOSE / "compose.yaml")
    return only


def services() -> dict[str, dict[str, Any]]:
    return compose()["services"]


# --- systemd ---------------------------------------------------------------------------------


def read_unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Section → name → its values, in order."""
    parser = configparser.RawConfigParser(strict=False, dict_type=_Lists, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return {
        section: {name: value.split("\n") for name, value in parser[section].items()}
        for section in parser.sections()
    }


class _Lists(dict[str, Any]):
    """Values of a name that is given again are added to the first."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, list) and name in self:
            self[name].extend(value)
        else:
            super().__setitem__(name, value)


# --- container files -------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """Every instruction of a container file, with its rest."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not re.match(r"\s*#", line)]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest.strip()) for word, rest in found]


def last(path: Path, name: str) -> str:
    return [rest for word, rest in instructions(path) if word == name][-1]


# --- all of it -------------------------------------------------------------------------------


def commands() -> list[Command]:
    """Every command of kvkeep's that a unit, a service, a pod or an image runs."""
    found = []
    for path in UNITS:
        (line,) = read_unit(path)["Service"]["ExecStart"]
        found.append(Command(path.name, shlex.split(line)[1:], SYSTEMD / "kvkeep.toml"))
    for name, service in services().items():
        if "kvkeep" in service["image"]:
            words = service["command"]
            found.append(Command(f"compose: {name}", words, COMPOSE / "kvkeep.toml"))
    for workload in [one for variant in VARIANTS for one in workloads(variant)]:
        if container(workload)["image"] == "kvkeep":
            name = f"kubernetes: {workload['metadata']['name']}"
            words = container(workload)["args"]
            found.append(Command(name, words, KUBERNETES / "base/kvkeep.toml"))
    words = json.loads(last(CONTAINER / "Containerfile", "CMD"))
    return [*found, Command("Containerfile", words, CONTAINER / "kvkeep.toml")]
