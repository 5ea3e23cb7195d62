"""Commands, options, addresses and metrics that `deploy` names are those of kvkeep."""

from __future__ import annotations

import json
import re
import sys

import pytest
from deployed import (
    DEPLOY,
    ROOT,
    VARIANTS,
    commands,
    component,
    container,
    of_kind,
    workloads,
)
from starlette.testclient import TestClient

from kvkeep.cli import _parser, main
from kvkeep.integrations.vllm.options import ConnectorOptions

sys.path.insert(0, str(ROOT / "scripts"))
from docs_site.http import document

INSTALLED = "/etc/kvkeep/kvkeep.toml"
ROUTED = {"/livez", "/ready"}
each = pytest.mark.parametrize("command", commands(), ids=lambda one: one.where)


def test_every_way_is_there():
    assert len(commands()) == 2 + 3 + 3 + 1
    assert {one.name for one in commands()} == {"serve", "route"}


@each
def test_a_command_parses_with_its_configuration(command, monkeypatch):
    """By the parser that reads the file as well, where an option or the environment names it."""
    monkeypatch.setenv("KVKEEP_CONFIG", str(command.config))
    words = [str(command.config) if word == INSTALLED else word for word in command.words]
    args = vars(_parser().parse_args(words))
    for option, value in command.section.items():
        got = args[option.replace("-", "_")]
        assert got == value or str(got) == value or option == "memory", option
    # A unit and a pod name the file; the images' own environment does.
    assert INSTALLED in command.words or command.where.startswith(("compose", "Containerfile"))


@pytest.mark.parametrize("file", sorted({one.config for one in commands()}), ids=str)
def test_a_configuration_is_one(file, capsys):
    """Every option exists and has a value of its kind, in each section."""
    assert main(["config", "check", str(file)]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_addresses_that_exist(variant):
    served = document()["paths"]
    for workload in workloads(variant):
        only = container(workload)
        paths = {
            only[kind]["httpGet"]["path"]
            for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        if only["image"] == "kvkeep-vllm":
            assert paths == {"/health"}  # vLLM's own
        elif component(workload) == "router":
            assert paths == ROUTED
        else:
            assert paths <= set(served)


def test_the_router_answers_probes():
    from kvkeep.serve.router import PrefixRouter
    from kvkeep.serve.router.proxy import create_proxy
    from kvkeep.serve.router.upstreams import Upstreams

    names = ["http://127.0.0.1:1"]
    client = TestClient(create_proxy(PrefixRouter(names), Upstreams(names)))
    assert [client.get(path).status_code for path in sorted(ROUTED)] == [200, 503]


def test_every_probe_exists_beside_kubernetes():
    asked = {
        path for file in ("compose/compose.yaml", "container/Containerfile")
        for path in re.findall(r"http://127\.0\.0\.1:\d+(/\w+)", (DEPLOY / file).read_text("utf-8"))
    }  # fmt: skip
    assert asked == {"/ready", "/livez"}
    assert asked <= set(document()["paths"])
    assert asked <= ROUTED


def test_arguments_of_vllm_are_those_of_its_page():
    """The options are vLLM's, which is not installed here: docs/vllm.md and docs/routing.md are."""
    (server,) = of_kind(workloads("vllm"), "StatefulSet")
    pages = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("vllm.md", "routing.md"))
    for argument in container(server)["args"][1:]:
        option = argument.partition("=")[0]
        if option not in {"--host", "--port"}:
            assert option in pages, option


def test_the_connector_takes_what_vllm_gives_it():
    (server,) = of_kind(workloads("vllm"), "StatefulSet")
    given = {
        option: json.loads(value)
        for option, _, value in (one.partition("=") for one in container(server)["args"][1:])
        if value.startswith("{")
    }
    assert set(given) == {"--kv-events-config", "--kv-transfer-config"}
    extra = given["--kv-transfer-config"]["kv_connector_extra_config"]
    assert list(ConnectorOptions.parse(extra).tiers) == extra["tiers"]
