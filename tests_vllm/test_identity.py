"""KV is named by what computed it: weights that were loaded, and every setting that decides."""

from __future__ import annotations

import dataclasses
import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import PROMPTS, Answer, engine, process_begins, prompt, same
from models import make_adapter
from safetensors.torch import load_file, save_file
from versions import OLD
from vllm import EngineArgs
from vllm.config import ModelConfig
from vllm.lora.request import LoRARequest

from kvkeep.integrations.vllm import naming
from kvkeep.integrations.vllm.content import Adapters
from kvkeep.integrations.vllm.naming import numbers_of, revision_of
from kvkeep.integrations.vllm.worker import WorkerSide
from kvkeep.store.identity import model_identity
from kvkeep.store.identity.values import NEUTRAL_CONFIG

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.fixture(scope="module")
def config(llama: str) -> VllmConfig:
    return configured(llama)


def configured(model: str, **more: Any) -> VllmConfig:
    return EngineArgs(
        model, **{"dtype": "float32", "max_model_len": 2048, "enforce_eager": True} | more
    ).create_engine_config()


def other(value: Any) -> Any:
    """A value that is not this one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, "x"]
    if isinstance(value, dict):
        return {**value, "x": 1}
    return "another"


# --- the configuration ----------------------------------------------------------------------------


def test_every_field_of_the_model_decides_or_is_named_as_neutral(config: VllmConfig) -> None:
    before = numbers_of(config)
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    elsewhere = {"use_fp64_gumbel"}  # fields of older or newer versions
    if OLD:
        elsewhere |= {"sleep_preserve_parameter_names", "sleep_mode_offload_cudagraph"}
    assert names | elsewhere >= naming._MODEL, "a field that vLLM does not have"
    for name in sorted(names - {"hf_config", "hf_text_config", "multimodal_config"}):
        changed = with_model(config, **{name: other(getattr(config.model_config, name))})
        assert (numbers_of(changed) == before) == (name in naming._MODEL), name


def test_every_attribute_of_the_resolved_configuration_decides(config: VllmConfig) -> None:
    before = numbers_of(config)
    named = config.model_config.hf_config.to_dict()
    assert {"rope_parameters", "rms_norm_eps", "attention_bias", "head_dim"} <= set(named)
    for name, value in named.items():
        hf = deepcopy(config.model_config.hf_config)
        hf.__dict__[name] = other(value)  # past what Transformers would say to it
        changed = with_model(config, hf_config=hf)
        neutral = name in NEUTRAL_CONFIG - {"architectures"}
        if numbers_of(changed) == before:
            assert neutral or hf.to_dict().get(name) == value, name
        else:
            assert not neutral, name


def with_model(config: VllmConfig, **more: Any) -> VllmConfig:
    changed = shallow(config)
    changed.model_config = shallow(config.model_config)
    for name, value in more.items():
        object.__setattr__(changed.model_config, name, value)
    return changed


def shallow(thing: Any) -> Any:
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config", "sliding_window", 64),
        ("attention_config", "flash_attn_version", 3),
        ("attention_config", "use_prefill_query_quantization", True),
        ("kernel_config", "linear_backend", "other"),
        ("compilation_config", "mode", 3),
        ("compilation_config", "custom_ops", ["none"]),
        ("load_config", "model_loader_extra_config", {"enable_multithread_load": True}),
        ("load_config", "load_format", "mistral"),
        ("load_config", "ignore_patterns", ["model-2*"]),
        ("parallel_config", "enable_expert_parallel", True),
    ],
)
def test_settings_beside_the_model_decide(
    config: VllmConfig, part: str, name: str, value: object
) -> None:
    changed = shallow(config)
    setattr(changed, part, shallow(getattr(config, part)))
    object.__setattr__(getattr(changed, part), name, value)
    assert numbers_of(changed) != numbers_of(config)


def test_an_upgrade_to_another_minor_version_is_another_name(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, computed = [], numbers_of(config)
    for version in ("0.32.0", "0.32.1", "0.33.0"):
        monkeypatch.setattr(naming.vllm, "__version__", version)
        named.append(naming.computed_by(computed))
    assert named[0] == named[1] != named[2]
    assert named[2].startswith("vLLM 0.33, torch")


def test_variables_of_the_environment_decide(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = numbers_of(config)
    for name, value, decides in (
        ("VLLM_CPU_ATTN_SPLIT_KV", "0", True),
        ("VLLM_BATCH_INVARIANT", "1", True),
        ("VLLM_LOGGING_LEVEL", "DEBUG", False),
        ("VLLM_API_KEY", "secret", False),
        ("VLLM_DP_RANK", "0", False),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601", False),  # each replica has another one
        ("VLLM_BUILD_COMMIT", "0123abc", False),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert (numbers_of(config) != before) == decides, name
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert numbers_of(config) != before
    finally:
        torch.set_float32_matmul_precision(precision)


def test_the_longest_text_decides_where_it_decides_how_positions_are_embedded(
    config: VllmConfig,
) -> None:
    for kind, decides in (("default", False), ("yarn", False), ("longrope", True),
                          ("dynamic", True), ("unheard of", True)):  # fmt: skip
        for rope in ({"rope_type": kind}, {"full_attention": {"rope_type": kind}}):
            text = deepcopy(config.model_config.hf_text_config)
            text.rope_parameters = rope
            short, long = (
                with_model(config, hf_text_config=text, max_model_len=length)
                for length in (2048, 4096)
            )
            assert (numbers_of(short) != numbers_of(long)) == decides, rope


def test_the_same_in_every_process_and_nothing_that_json_cannot_write(llama: str) -> None:
    first, second = numbers_of(configured(llama)), numbers_of(configured(llama))
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert " at 0x" not in json.dumps(first)


def test_neutral_settings_are_neutral_in_an_engine(llama: str, cold: list[Answer]) -> None:
    """Not a bit of a logit is another, and what the one stored the other finds."""
    changed: dict[str, Any] = {
        "max_model_len": 1024, "seed": 7, "served_model_name": "another", "max_logprobs": 9,
        "num_gpu_blocks_override": 700, "gpu_memory_utilization": 0.5, "trust_remote_code": True,
        "generation_config": "vllm", "allowed_media_domains": ["example.org"],
    }  # fmt: skip
    assert numbers_of(configured(llama, **changed)) == numbers_of(configured(llama))
    with engine(llama, **changed) as one:
        same(cold, one.ask(PROMPTS), most=0.0)


# --- the weights ----------------------------------------------------------------------------------


def scaled(model: Path, by: float) -> None:
    """Replace the weights in one step, as a careful deployment does."""
    tensors = load_file(model / "model.safetensors")
    save_file({name: each * by for name, each in tensors.items()}, model / "new",
              metadata={"format": "pt"})  # fmt: skip
    (model / "new").rename(model / "model.safetensors")


def edited(model: Path, **more: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def test_an_edited_configuration_finds_nothing(llama: str, tmp_path: Path) -> None:
    model = tmp_path / "llama"
    shutil.copytree(llama, model)
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    mine = [prompt(200, seed=40)]
    with engine(str(model), tiers) as one:
        old = one.ask(mine)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 1024}  # fmt: skip
    edited(model, rope_parameters=yarn)
    with engine(str(model), tiers) as one:
        new = one.ask(mine)
        assert new[0].cached == 0
        assert new[0].differs(old[0]) > 0.01


def test_weights_replaced_after_they_were_loaded(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "llama"
    shutil.copytree(llama, model)
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    mine = [prompt(200, seed=41)]
    register = WorkerSide.register

    def late(self: WorkerSide, caches: dict[str, torch.Tensor]) -> None:
        scaled(model, 1.2)
        register(self, caches)

    with monkeypatch.context() as patched:
        patched.setattr(WorkerSide, "register", late)
        with engine(str(model), tiers) as one:
            old = one.ask(mine)
    with engine(str(model), tiers) as one:
        new = one.ask(mine)
        assert new[0].cached == 0
        assert new[0].differs(old[0]) > 0.01
    with engine(str(model), tiers) as one:
        again = one.ask(mine)
        assert again[0].cached == 192
        same(new, again)


def test_which_files_name_the_weights(llama: str, tmp_path: Path) -> None:
    model = tmp_path / "llama"
    shutil.copytree(llama, model)

    def revision(**more: Any) -> str:
        process_begins()
        return revision_of(configured(str(model), **more), "")

    whole = revision()
    assert whole == revision()
    assert not whole.startswith("process")
    # Another file that vLLM may load: another name, never the same one.
    save_file({"x": torch.ones(3)}, model / "extra.safetensors")
    extra = revision()
    assert extra not in (whole, revision(load_format="dummy"))
    # Pickled weights are not read: no name that another process has.
    for load_format in ("pt", "npcache", "sharded_state", "tensorizer"):
        assert revision(load_format=load_format).startswith("process"), load_format
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    assert revision().startswith("process")
    assert revision_of(configured(str(model)), "mine") == "mine"


def test_a_model_of_the_hub_is_the_one_that_was_loaded(
    config: VllmConfig, llama: str, tmp_path: Path
) -> None:
    commits = ["1" * 40, "2" * 40]
    home = tmp_path / "models--org--model"
    for commit in commits:
        shutil.copytree(llama, home / "snapshots" / commit)
    scaled(home / "snapshots" / commits[1], 2.0)
    branch = home / "refs" / "main"
    branch.parent.mkdir()
    branch.write_text(commits[0])

    def revision(**model: Any) -> str:
        named = {"model": "org/model", "model_weights": "", "revision": None}
        changed = with_model(config, **named | model)
        changed.load_config = shallow(config.load_config)
        object.__setattr__(changed.load_config, "download_dir", str(tmp_path))
        return revision_of(changed, "")

    process_begins()
    first = revision()
    assert first == revision() == model_identity(llama)
    branch.write_text(commits[1])  # while it loads: which of them was it?
    assert revision().startswith("process")
    assert revision(revision=commits[0]) == first
    process_begins()
    assert revision() == revision(revision=commits[1]) != first
    assert revision(model_weights="s3://weights").startswith("process")
    for commit in commits:  # weights that are not read
        (home / "snapshots" / commit / "model.safetensors").rename(
            home / "snapshots" / commit / "pytorch_model.bin"
        )
    assert revision() == f"commit {commits[1]}"
    assert revision(model="org/not here").startswith("process")
    assert revision(model="org/not", revision="3" * 40) == f"commit {'3' * 40}"


def test_an_adapter_swapped_after_it_was_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    path = Path(make_adapter(tmp_path / "one", 1))
    request = LoRARequest("a", 1, str(path))
    process_begins()
    first = Adapters().digest(request)
    assert first is not None
    assert first == Adapters().digest(request), "another process names it the same"
    # vLLM loads an adapter when it starts, or when it is told to; then come requests.
    make_adapter(path, 2)
    second = Adapters().digest(request)
    assert second is not None
    assert second not in (first, Adapters().digest(request))
    process_begins()
    settled = Adapters().digest(request)
    assert settled == Adapters().digest(request) != first
    edited_scale = json.loads((path / "adapter_config.json").read_text()) | {"lora_alpha": 8}
    (path / "adapter_config.json").write_text(json.dumps(edited_scale))
    process_begins()
    assert Adapters().digest(request) not in (settled, first)
