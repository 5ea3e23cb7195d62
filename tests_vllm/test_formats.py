"""Pages of several versions of vLLM: which are proven equal, and what an upgrade finds."""

from __future__ import annotations

import logging
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import page_fixtures
import pytest
import torch
import vllm
from engines import LENGTHS, PROMPTS, Answer, engine, same
from engines import found as length_found
from page_fixtures import MODELS, PROOFS

from kvkeep.integrations.vllm import naming
from kvkeep.integrations.vllm.formats import PageFormat, page_format

if TYPE_CHECKING:
    from pathlib import Path


def numbers_of(proof: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The settings of an engine with this model, of other sizes."""
    settings = proof["settings"][model["settings"]]
    hf = sized(model["kind"]["hf"])
    return settings | {"vllm": proof["vllm"], "torch": [proof["torch"], *settings["torch"]],
                       "hf": hf, "hf_text": hf, "longest": None}  # fmt: skip


def sized(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: sized(each) for name, each in kind.items()}
    return 7 if kind == "a number" else kind


def asked(proof: dict[str, Any], **other: Any) -> PageFormat:
    """The name of the first fixture's pages."""
    model = proof["models"][0]
    numbers = numbers_of(proof, model) | other.pop("numbers", {})
    given = {"dtype": model["dtype"], "machine": proof["machine"]} | other
    given.setdefault("packings", [f"{given['dtype'].split('/')[0][6:]} 128 32"])
    return page_format(numbers, **given)


def test_this_version_still_writes_what_is_proven(proof: dict[str, Any], tmp_path: Path) -> None:
    machine = page_fixtures.written("llama3", "bfloat16", compiled=False, directory=tmp_path)
    if machine["machine"] != proof["machine"]:
        pytest.skip(f"the proofs are of {proof['machine']}")
    assert page_fixtures.packings() == proof["packings"]
    (model,) = [
        model
        for model in proof["models"]
        if (model["name"], model["dtype"], model["mode"])
        == ("llama3", machine["dtype"], machine["mode"])
    ]
    assert model["pages"] == machine["pages"]
    assert model["kind"] == machine["kind"]
    assert proof["settings"][model["settings"]] == machine["settings"]


def test_proofs_are_of_other_bytes_for_other_numbers() -> None:
    """Else equal digests would say nothing."""
    for proof in PROOFS:
        of = {model["dtype"]: set() for model in proof["models"]}  # type: ignore[var-annotated]
        for model in proof["models"]:
            of[model["dtype"]].add(model["pages"])
        bfloat16, float32 = of.values()
        assert not bfloat16 & float32
        assert len(bfloat16) > len(MODELS) / 2
        assert len(set(proof["packings"].values())) > len(proof["packings"]) / 2


def test_equal_pages_share_a_name(proof: dict[str, Any], proofs: list[dict[str, Any]]) -> None:
    older = deepcopy(proof) | {"vllm": "0.1.0"}
    proofs += [older, proof]
    found = asked(proof)
    assert found.versions == ("0.1.0", proof["vllm"])
    assert not found.reason
    proofs.remove(older)
    assert asked(proof).name == found.name, "another version that is proven changes no name"


@pytest.mark.parametrize("what", ["pages", "packing"])
def test_other_pages_have_another_name(
    proof: dict[str, Any], proofs: list[dict[str, Any]], what: str
) -> None:
    newer = deepcopy(proof)
    newer["vllm"] = "99.0"
    if what == "pages":
        newer["models"][0]["pages"] = "0" * 32
    else:
        newer["packings"]["bfloat16 128 32"] = "0" * 32
    proofs += [newer, proof]
    before = asked(proof)
    assert before.versions == (proof["vllm"],)
    proof["models"][0]["pages"] = newer["models"][0]["pages"]
    proof["packings"] = newer["packings"]
    assert asked(proof).name != before.name


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"machine": "cuda x86_64 FLASH_ATTN"}, "is not proven on cuda x86_64 FLASH_ATTN"),
        ({"packings": None}, "several ranks, states, latent KV"),
        ({"packings": ["bfloat16 72 32"]}, "heads of 72 and blocks of 32 are not proven"),
        ({"dtype": "torch.bfloat16/fp8/None"}, "the most similar fixture in dtype"),
        ({"numbers": {"lora": {"x": 1}}}, "the most similar fixture in settings.lora"),
        ({"numbers": {"new": 1}}, "the most similar fixture in settings.new"),
        ({"numbers": {"torch": ["2.0", "medium"]}}, "settings.torch"),
        ({"numbers": {"longest": 4096}}, "kind.longest"),
    ],
)
def test_what_is_not_proven_is_named_by_its_version(
    proof: dict[str, Any], proofs: list[dict[str, Any]], other: dict[str, Any], reason: str
) -> None:
    proofs += [deepcopy(proof) | {"vllm": "0.1.0"}, proof]
    found = asked(proof, **{"packings": ["bfloat16 128 32"]} | other)
    assert not found.versions
    assert reason in found.reason
    assert found.name.startswith(f"vLLM {proof['vllm']}, torch {proof['torch']}; settings ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_act", "relu"), ("attention_bias", True), ("rope_parameters", {"rope_type": "yarn"}),
     ("architectures", ["Other"]), ("quantization_config", {"bits": 4}), ("sliding_window", 7)],
)  # fmt: skip
def test_a_model_of_another_kind_is_not_proven(
    proof: dict[str, Any], proofs: list[dict[str, Any]], name: str, value: Any
) -> None:
    proofs.append(proof)
    hf = numbers_of(proof, proof["models"][0])["hf"] | {name: value}
    found = asked(proof, numbers={"hf": hf, "hf_text": hf})
    assert not found.versions
    assert f"kind.hf.{name}" in found.reason


def test_another_version_or_torch_is_not_proven(
    proof: dict[str, Any], proofs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs.append(proof)
    known = asked(proof).name
    for module, version in ((vllm, "0.32.0.dev1"), (torch, "2.13.0+cu130")):
        with monkeypatch.context() as patched:
            patched.setattr(module, "__version__", version)
            found = asked(proof)
            assert version in found.name
            assert "is not proven on" in found.reason
    assert asked(proof).name == known


# --- an upgrade -----------------------------------------------------------------------------------


@pytest.fixture
def versions(
    proof: dict[str, Any], proofs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """This version, another one with equal pages, one with others, and one without a proof."""
    equal, unlike = deepcopy(proof) | {"vllm": "98.0"}, deepcopy(proof) | {"vllm": "99.0"}
    for model in unlike["models"]:
        model |= {"pages": "0" * 32, "as": "99.0"}
    proofs += [proof, equal, unlike]
    # Names are compared here, and this machine may be another one than that of the fixtures.
    monkeypatch.setattr(naming, "machine_of", lambda *args: proof["machine"])
    return proof["vllm"], "98.0", "99.0", "100.0"


def test_an_upgrade_finds_what_is_proven_equal_and_says_why_else(
    llama: str, cold: list[Answer], versions: tuple[str, ...], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tiers = ["memory://8MiB", f"file://{tmp_path}/kv?size=256MiB"]
    caplog.set_level(logging.INFO, "kvkeep")
    said: dict[str, str] = {}
    found: dict[str, int] = {}
    for version in versions:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(vllm, "__version__", version)
            with engine(llama, tiers) as one:
                answers = one.ask(PROMPTS[-2:])
        same(cold[-2:], answers)
        found[version] = sum(answer.cached for answer in answers)
        said[version] = caplog.text
        caplog.clear()
    mine, equal, unlike, unknown = versions
    assert found == {mine: 0, equal: sum(map(length_found, LENGTHS[-2:])), unlike: 0, unknown: 0}
    assert f"shares pages with vLLM {mine}, {equal}: proven equal" in said[equal]
    cold_text = "holds blocks, but none of this store"
    assert [cold_text in said[version] for version in versions] == [False, False, True, True]
    assert "geometry is 'pages as vLLM" in said[unlike]
    assert "and 'pages as vLLM 99.0" in said[unlike]
    assert "is cold after an upgrade: vLLM 100.0 with torch" in said[unknown]


def test_amx_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It packs bfloat16 in its own order, and PyTorch calls both AVX512."""
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    said = []
    for has in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"amx_tile": has})
        said.append(naming.machine_of(config, [], torch.device("cpu")))
    assert ["/AMX" in each for each in said] == [False, True]


def test_the_same_backends_for_other_layers_are_another_machine() -> None:
    """As where layers with a window have one backend, and the others another one."""

    def said(*backends: str) -> str:
        layers = {
            f"layer {at}": SimpleNamespace(
                get_attn_backend=lambda name=name: SimpleNamespace(get_name=lambda: name)
            )
            for at, name in enumerate(backends)
        }
        config: Any = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers)
        )
        return naming.machine_of(config, layers, torch.device("cpu"))

    assert said("ONE", "TWO") != said("TWO", "ONE")
    assert said("ONE", "ONE").endswith(" ONE"), "as the proofs name it"
