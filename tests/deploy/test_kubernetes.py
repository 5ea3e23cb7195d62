"""The manifests: what Kubernetes takes, and what fits together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from deployed import (
    DEPLOY,
    ENDING_S,
    FLUSH_S,
    KUBERNETES,
    ROOT,
    VARIANTS,
    component,
    container,
    container_ports,
    deployed,
    manifests,
    of_kind,
    pod,
    pod_labels,
    read_config,
    read_yaml,
    selects,
    tool,
    workloads,
)

from kvkeep.core.geometry.units import parse_bytes

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = read_config(KUBERNETES / "base/kvkeep.toml")
ALL = [
    pytest.param(one, id=f"{folder}: {one['kind']} {one['metadata']['name']}")
    for folder in ("base", *VARIANTS)
    for one in manifests(folder)
]
RUNNING = [
    pytest.param(one, id=f"{variant}: {one['metadata']['name']}")
    for variant in VARIANTS
    for one in workloads(variant)
]


def check(one: dict[str, Any]) -> None:
    """Hold an object against Kubernetes' schemas; what a schema does not know is an error."""
    validate = pytest.importorskip("kubernetes_validate")
    for version in ("1.30", validate.latest_version()):
        validate.validate(one, version, strict=True)


@pytest.mark.parametrize("one", ALL)
def test_an_object_is_what_kubernetes_takes(one):
    check(one)


def test_the_schemas_refuse_what_is_wrong():
    validate = pytest.importorskip("kubernetes_validate")
    (router,) = of_kind(manifests("base"), "Deployment")
    wrong = json.loads(json.dumps(router))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(validate.ValidationError):
        check(wrong)


def built(folder: Path) -> list[dict[str, Any]]:
    """What kustomize makes of a folder."""
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(folder)],  # kustomize is part of it
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomize_makes_objects_that_kubernetes_takes(variant):
    made = built(KUBERNETES / variant)
    assert len(made) == len(deployed(variant)) + 1  # the ConfigMap
    for one in made:
        check(one)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "kvkeep"
    (config,) = of_kind(made, "ConfigMap")
    assert re.fullmatch(r"kvkeep-[a-z0-9]{10}", config["metadata"]["name"])
    for workload in of_kind(made, "Deployment", "StatefulSet"):
        names = [one["configMap"]["name"] for one in pod(workload)["volumes"] if "configMap" in one]
        image = container(workload)["image"]
        assert re.fullmatch(r"registry\.example/[\w-]+:0\.1\.0", image)
        # vLLM is told all by its arguments.
        assert names == ([] if "kvkeep-vllm" in image else [config["metadata"]["name"]])


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A kustomization of the servers, to be changed."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    return tmp_path / "deploy/kubernetes/serve/kustomization.yaml"


def test_components_are_built_as_well(copied):
    text = copied.read_text("utf-8").replace("# components:", "components:")
    copied.write_text(text.replace("[../monitoring]", "[../monitoring, ../../grafana]"), "utf-8")
    made = built(copied.parent)
    monitors = of_kind(made, "ServiceMonitor")
    assert [one["metadata"]["namespace"] for one in monitors] == ["kvkeep", "kvkeep"]
    (dashboard,) = [
        one for one in of_kind(made, "ConfigMap")
        if "grafana_dashboard" in one["metadata"].get("labels", {})
    ]  # fmt: skip
    assert json.loads(dashboard["data"]["kvkeep.json"])["uid"] == "kvkeep"


def test_the_page_s_patch_mounts_models(copied):
    page = (ROOT / "docs/deploy.md").read_text("utf-8")
    (patch,) = re.findall(r"```yaml\n# deploy/kubernetes/serve/\S+\n(.*?)```", page, re.DOTALL)
    copied.write_text(copied.read_text("utf-8") + patch, "utf-8")
    (server,) = of_kind(built(copied.parent), "StatefulSet")
    check(server)
    assert pod(server)["volumes"][-1]["persistentVolumeClaim"]["claimName"] == "models"
    assert container(server)["volumeMounts"][-1]["mountPath"] == "/models"


@pytest.mark.parametrize("folder", ["base", *VARIANTS, "monitoring"])
def test_a_folder_lists_its_files(folder):
    (listed,) = read_yaml(KUBERNETES / folder / "kustomization.yaml")
    files = {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {one for one in listed["resources"] if one.endswith(".yaml")}
    assert all((KUBERNETES / folder / one).exists() for one in listed["resources"])


# --- pods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", RUNNING)
def test_a_pod_has_no_rights(workload):
    spec, only = pod(workload), container(workload)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 10000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    confined = only["securityContext"]
    assert confined["allowPrivilegeEscalation"] is False
    assert confined["capabilities"] == {"drop": ["ALL"]}
    if only["image"] == "kvkeep":
        assert confined["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert "memory" in only["resources"]["limits"]
    assert {"cpu", "memory"} <= set(only["resources"]["requests"])


@pytest.mark.parametrize("workload", RUNNING)
def test_what_a_pod_mounts_is_there(workload):
    claims = workload["spec"].get("volumeClaimTemplates", [])
    there = {one["name"] for one in pod(workload)["volumes"]}
    there |= {one["metadata"]["name"] for one in claims}
    mounted = {one["name"] for one in container(workload)["volumeMounts"]}
    assert mounted == there
    for one in pod(workload)["volumes"]:
        assert one.get("configMap", {"name": "kvkeep"}) == {"name": "kvkeep"}


@pytest.mark.parametrize("workload", RUNNING)
def test_a_pod_has_time_to_end(workload):
    hook = container(workload).get("lifecycle", {}).get("preStop", {}).get("exec", {})
    waits = float(hook["command"][1]) if hook else 0
    if component(workload) == "router":
        needs = CONFIG["route"]["drain-timeout"]
        assert waits > 0, "a Service sends requests for a while to a pod that leaves"
    elif container(workload)["image"] == "kvkeep":
        needs = CONFIG["serve"]["drain-timeout"] + FLUSH_S
    else:
        (told,) = [one for one in container(workload)["args"] if "--shutdown-timeout" in one]
        needs = float(told.split("=")[1]) + FLUSH_S
    assert pod(workload)["terminationGracePeriodSeconds"] >= waits + needs + ENDING_S


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_upgrade_waits_until_routers_know_a_new_server(variant):
    """Or the last server that they know would go before they have heard of the first new one."""
    (servers,) = of_kind(manifests(variant), "StatefulSet")
    cached_s, every_s = 30, 5.0
    assert servers["spec"]["minReadySeconds"] >= cached_s + every_s


@pytest.mark.parametrize("workload", RUNNING)
def test_probes_ask_a_port_that_there_is(workload):
    only = container(workload)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert only[kind]["httpGet"]["port"] in container_ports(workload)
        assert only[kind]["timeoutSeconds"] <= only[kind]["periodSeconds"]
    # A pod leaves the Service long before it is restarted, and a start has minutes.
    seconds = {
        kind: only[kind]["periodSeconds"] * only[kind]["failureThreshold"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert seconds["readinessProbe"] * 5 < seconds["livenessProbe"] <= seconds["startupProbe"]


def test_a_server_has_the_memory_and_the_disk_that_its_configuration_takes():
    (server,) = of_kind(manifests("serve"), "StatefulSet")
    limit = _bytes(container(server)["resources"]["limits"]["memory"])
    memory = [url for url in CONFIG["serve"]["tier"] if url.startswith("memory://")]
    taken = sum(parse_bytes(url.removeprefix("memory://")) for url in memory)
    assert taken + parse_bytes(CONFIG["serve"]["memory"]) + (2 << 30) <= limit
    (claim,) = server["spec"]["volumeClaimTemplates"]
    volume = _bytes(claim["spec"]["resources"]["requests"]["storage"])
    (disk,) = [url for url in CONFIG["serve"]["tier"] if url.startswith("file://")]
    assert parse_bytes(disk.split("size=")[1]) <= 0.9 * volume
    mounts = {one["name"]: one["mountPath"] for one in container(server)["volumeMounts"]}
    assert disk.startswith(f"file://{mounts['kv']}/")


def _bytes(quantity: str) -> int:
    return parse_bytes(f"{quantity}B")


def test_the_key_is_where_the_configuration_looks_for_it():
    (server,) = of_kind(manifests("serve"), "StatefulSet")
    mounts = {one["name"]: one["mountPath"] for one in container(server)["volumeMounts"]}
    assert CONFIG["serve"]["api-key-file"] == f"{mounts['key']}/api-key"
    (secret,) = [one["secret"] for one in pod(server)["volumes"] if "secret" in one]
    (vllm,) = of_kind(manifests("vllm"), "StatefulSet")
    (key,) = [one for one in container(vllm)["env"] if one["name"] == "VLLM_API_KEY"]
    monitored = {
        json.dumps(one["authorization"]["credentials"])
        for monitor in manifests("monitoring")
        for one in monitor["spec"]["endpoints"]
        if "authorization" in one
    }
    assert secret["secretName"] == "kvkeep"
    assert key["valueFrom"]["secretKeyRef"] == {"name": "kvkeep", "key": "api-key"}
    assert monitored == {json.dumps({"name": "kvkeep", "key": "api-key"})}


# --- what connects them ----------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_agree(variant):
    objects = deployed(variant)
    for workload in workloads(variant):
        ports = container_ports(workload)
        if component(workload) == "router":
            assert ports == {"http": CONFIG["route"]["port"]}
            continue
        assert ports["http"] == CONFIG["serve"]["port"]
        assert CONFIG["serve"]["events"].endswith(f":{ports['events']}")
        assert ports["replay"] == ports["events"] + 1
        for name in ("events", "replay"):
            assert CONFIG["route"][name].endswith(f":{ports[name]}")
        if variant == "vllm":
            args = " ".join(container(workload)["args"])
            assert f"--port={ports['http']} " in args
            assert (
                f'"tcp://*:{ports["events"]}", "replay_endpoint": "tcp://*:{ports["replay"]}"'
                in args
            )
    for service in of_kind(objects, "Service"):
        (chosen,) = [
            one for one in workloads(variant)
            if selects(service["spec"]["selector"], pod_labels(one))
        ]  # fmt: skip
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in container_ports(chosen)
    (servers,) = [one for one in of_kind(objects, "Service") if "clusterIP" in one["spec"]]
    assert servers["spec"]["clusterIP"] == "None"
    (http,) = [one["port"] for one in servers["spec"]["ports"] if one["name"] == "http"]
    assert CONFIG["route"]["discover"] == [f"dns://{servers['metadata']['name']}:{http}"]
    (stateful,) = of_kind(objects, "StatefulSet")
    assert stateful["spec"]["serviceName"] == servers["metadata"]["name"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_choose_pods(variant):
    every = [pod_labels(one) for one in workloads(variant)]
    for one in of_kind(deployed(variant), "PodDisruptionBudget"):
        wanted = one["spec"]["selector"]["matchLabels"]
        (chosen,) = [
            workload for workload in workloads(variant) if selects(wanted, pod_labels(workload))
        ]
        assert one["spec"].get("minAvailable", 0) < chosen["spec"]["replicas"]
    for workload in workloads(variant):
        assert workload["spec"]["selector"]["matchLabels"] == pod_labels(workload)
    for policy in of_kind(deployed(variant), "NetworkPolicy"):
        chosen = policy["spec"]["podSelector"].get("matchLabels", {})
        assert any(selects(chosen, labels) for labels in every)
        for rule in policy["spec"].get("ingress", []) + policy["spec"].get("egress", []):
            for peer in rule.get("from", []) + rule.get("to", []):
                if "podSelector" in peer:
                    labels = peer["podSelector"]["matchLabels"]
                    assert any(selects(labels, one) for one in every)
    for monitor in manifests("monitoring"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [
            one for one in of_kind(deployed(variant), "Service")
            if selects(wanted, one["metadata"]["labels"])
        ]  # fmt: skip
        names = {port["name"] for port in service["spec"]["ports"]}
        assert {one["port"] for one in monitor["spec"]["endpoints"]} <= names


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_routers_reach_the_events_of_servers(variant):
    """Every way from one pod to another, by the policies' own rules."""
    policies = of_kind(deployed(variant), "NetworkPolicy")
    labels = {
        pod_labels(one)["app.kubernetes.io/component"]: pod_labels(one)
        for one in workloads(variant)
    }
    stranger = {"app": "another"}

    def may(direction: str, one: dict[str, str], other: dict[str, str], port: str) -> bool:
        kind = "Ingress" if direction == "ingress" else "Egress"
        concerned = [
            policy["spec"] for policy in policies
            if kind in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"].get("matchLabels", {}), one)
        ]  # fmt: skip
        assert concerned, "a pod that no policy chooses may do everything"
        for rule in [rule for spec in concerned for rule in spec.get(direction, [])]:
            if port not in {named["port"] for named in rule["ports"]}:
                continue
            peers = rule.get("from" if direction == "ingress" else "to")
            if peers is None or any(
                selects(peer["podSelector"]["matchLabels"], other)
                for peer in peers if "podSelector" in peer
            ):  # fmt: skip
                return True
        return False

    server, router = labels["server"], labels["router"]
    for port in ("http", "events", "replay"):
        assert may("ingress", server, router, port)
        assert may("egress", router, server, port)
        assert not may("ingress", server, server, port)
        assert not may("ingress", server, stranger, port)
        assert not may("egress", server, router, port)
    assert may("egress", router, stranger, 53)  # type: ignore[arg-type] - DNS
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            assert "from" in rule, "without `from`, everyone may"
            events = {"events", "replay"} & {port["port"] for port in rule["ports"]}
            assert not events or all("podSelector" in peer for peer in rule["from"])


def test_the_rules_become_a_prometheusrule_by_indenting_them():
    """What docs/deploy.md says to do."""
    text = (DEPLOY / "prometheus/kvkeep-rules.yml").read_text("utf-8")
    made = yaml.safe_load("spec:\n" + re.sub(r"^", "  ", text, flags=re.MULTILINE))
    assert made["spec"] == yaml.safe_load(text)
    assert (
        "sed 's/^/  /' deploy/prometheus/kvkeep-rules.yml" in (ROOT / "docs/deploy.md").read_text()
    )
