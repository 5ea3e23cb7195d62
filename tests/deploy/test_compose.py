"""The compose file: what the specification allows, and what fits together."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from deployed import (
    COMPOSE,
    DEPLOY,
    ENDING_S,
    FLUSH_S,
    compose,
    read_config,
    read_yaml,
    services,
    tool,
)

CONFIG = read_config(COMPOSE / "kvkeep.toml")
OURS = [name for name, one in services().items() if "kvkeep" in one["image"]]
SERVERS = [name for name in OURS if services()[name]["command"] == ["serve"]]


def test_there_are_two_servers_and_what_is_around_them():
    assert SERVERS == ["server-1", "server-2"]
    assert set(services()) == {*SERVERS, "router", "valkey", "prometheus", "grafana"}


def test_docker_compose_takes_the_file():
    """Compose's own program, which reads files without an engine, and refuses unknown fields."""
    found = tool("docker-compose")
    done = subprocess.run(
        [found, "-f", str(COMPOSE / "compose.yaml"), "config", "--format", "json"],
        capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": os.environ["PATH"], "KVKEEP_API_KEY": "a-key"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    resolved = json.loads(done.stdout)["services"]
    assert set(resolved) == set(services())
    for name in SERVERS:
        assert resolved[name]["environment"]["KVKEEP_API_KEY"] == "a-key"
    assert all(resolved[name]["read_only"] for name in OURS)


def test_only_the_loopback_address_is_published():
    published = [port for one in services().values() for port in one.get("ports", [])]
    assert len(published) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)


def test_only_the_router_leads_from_outside_to_the_servers():
    assert compose()["networks"]["kvkeep"] == {"internal": True}
    for name in [*SERVERS, "valkey"]:
        assert set(services()[name]["networks"]) == {"kvkeep"}
        assert "ports" not in services()[name]


@pytest.mark.parametrize("name", services())
def test_a_service_has_no_rights(name):
    one = services()[name]
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "ipc"} & set(one)
    if name not in OURS:
        assert re.fullmatch(r"docker\.io/[\w/]+:v?\d+\.\d+[\w.-]*", one["image"]), "a version"


def test_only_servers_have_their_key():
    having = {name for name in OURS if "KVKEEP_API_KEY" in services()[name].get("environment", {})}
    assert having == set(SERVERS)


@pytest.mark.parametrize("name", services())
def test_files_that_are_mounted_are_there(name):
    for volume in services()[name].get("volumes", []):
        source, _, rest = volume.partition(":")
        if source.startswith("."):
            assert (COMPOSE / source).is_file(), source
            assert rest.endswith(":ro")
        else:
            assert source in compose()["volumes"]


def test_the_image_is_built_from_the_container_file():
    built = [one["build"] for one in services().values() if "build" in one]
    assert built == [{"context": "../..", "dockerfile": "deploy/container/Containerfile"}]
    assert (COMPOSE / built[0]["context"] / built[0]["dockerfile"]).is_file()
    assert len({services()[name]["image"] for name in OURS}) == 1


@pytest.mark.parametrize("name", OURS)
def test_one_of_ours_has_time_to_end(name):
    section = CONFIG[services()[name]["command"][0]]
    needs = section["drain-timeout"] + (FLUSH_S if "tier" in section else 0)
    given = re.fullmatch(r"(\d+)s", services()[name]["stop_grace_period"])
    assert int(given[1]) >= needs + ENDING_S


@pytest.mark.parametrize("name", OURS)
def test_the_health_check_asks_the_port_that_is_served(name):
    section = CONFIG[services()[name]["command"][0]]
    (address,) = re.findall(r"'(http://[^']+)'", services()[name]["healthcheck"]["test"][-1])
    assert urlsplit(address).netloc == f"127.0.0.1:{section['port']}"
    assert urlsplit(address).path == "/ready"
    compile(services()[name]["healthcheck"]["test"][-1], name, "exec")


def test_the_router_finds_the_servers_by_name():
    (found,) = CONFIG["route"]["discover"]
    host, _, port = found.removeprefix("dns://").partition(":")
    assert int(port) == CONFIG["serve"]["port"]
    for name in SERVERS:
        assert services()[name]["networks"]["kvkeep"]["aliases"] == [host]
    assert "kvkeep" in services()["router"]["networks"]
    served = CONFIG["serve"]["events"].rpartition(":")[2]
    assert CONFIG["route"]["events"].rpartition(":")[2] == served
    assert CONFIG["route"]["replay"].rpartition(":")[2] == str(int(served) + 1)
    (published,) = services()["router"]["ports"]
    assert published.endswith(f":{CONFIG['route']['port']}")


def test_tiers_are_a_service_and_a_volume():
    disk, valkey = CONFIG["serve"]["tier"][1:]
    assert urlsplit(valkey).hostname in services()
    for name in SERVERS:
        mounts = [volume.split(":")[1] for volume in services()[name]["volumes"]]
        assert any(urlsplit(disk).path.startswith(f"{place}/") for place in mounts)
    volumes = [services()[name]["volumes"][-1] for name in SERVERS]
    assert len(set(volumes)) == 2, "each server has a volume of its own"


def test_prometheus_scrapes_what_there_is():
    (prometheus,) = read_yaml(COMPOSE / "prometheus.yml")
    targets = [
        target for job in prometheus["scrape_configs"] for one in job["static_configs"]
        for target in one["targets"]
    ]  # fmt: skip
    ports = {name: CONFIG[services()[name]["command"][0]]["port"] for name in OURS}
    assert sorted(targets) == sorted(f"{name}:{port}" for name, port in ports.items())
    mounts = dict(volume.split(":")[1::-1] for volume in services()["prometheus"]["volumes"])
    (rules,) = prometheus["rule_files"]
    assert mounts[rules] == "../prometheus/kvkeep-rules.yml"
    config = "--config.file=/etc/prometheus/prometheus.yml"
    assert config in services()["prometheus"]["command"]
    assert mounts[config.partition("=")[2]] == "./prometheus.yml"


def test_promtool_takes_the_configuration_and_the_rules(tmp_path):
    promtool = tool("promtool")
    rules = DEPLOY / "prometheus/kvkeep-rules.yml"
    text = (COMPOSE / "prometheus.yml").read_text("utf-8")
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("/etc/prometheus/kvkeep-rules.yml", str(rules)), "utf-8")
    for words in (["config", str(config)], ["rules", str(rules)]):
        done = subprocess.run(
            [promtool, "check", *words], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_prometheus_and_the_dashboard():
    (sources,) = read_yaml(COMPOSE / "grafana/datasources.yml")
    (source,) = sources["datasources"]
    address = urlsplit(source["url"])
    assert address.hostname == "prometheus"
    (published,) = services()["prometheus"]["ports"]
    assert published.endswith(f":{address.port}")
    mounts = dict(volume.split(":")[1::-1] for volume in services()["grafana"]["volumes"])
    for kind in ("datasources", "dashboards"):
        assert mounts[f"/etc/grafana/provisioning/{kind}/kvkeep.yml"] == f"./grafana/{kind}.yml"
    (dashboards,) = read_yaml(COMPOSE / "grafana/dashboards.yml")
    (provider,) = dashboards["providers"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provider["options"]["path"]
    assert json.loads((COMPOSE / mounts[home]).read_text("utf-8"))["uid"] == "kvkeep"
