"""The identity of a model: everything that decides changes it, nothing else does."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from functools import partial, wraps

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.models import bundled_model
from kvkeep.store import model_identity
from kvkeep.store.identity import is_loaded, values
from kvkeep.store.identity.modules import lines_of


class Scaled(nn.Module):
    """A layer as models have them: weights, a buffer that is not saved, plain attributes."""

    def __init__(self, width=8, seed=0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=random))
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.original_inv_freq = torch.arange(4.0)
        self.epsilon = 1e-6
        self.window = None
        self.scaling = {"default": 2.0}
        self.active = ["default"]

    def forward(self, rows):
        return rows @ self.weight * self.scaling["default"]


def model(layers=3):
    return nn.Sequential(*(Scaled(seed=seed) for seed in range(layers)))


def llama(**changes):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **changes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def swap(module):
    module[0], module[1] = module[1], module[0]


def set_in(name, value):
    return lambda module: setattr(module[1], name, value)


def other_class(module):
    class Scaled(nn.Module):  # the same names, another computation
        forward = lambda self, rows: rows  # noqa: E731

    Scaled.__module__, Scaled.__qualname__ = type(module[1]).__module__, "Scaled"
    module[1].__class__ = Scaled


def own_forward(factor):
    def change(module):
        module[1].forward = lambda rows: rows * factor

    return change


def carries(module):
    module[1].weight.quant_state = {"scale": torch.ones(2)}


def partial_hook(factor):
    def times(factor, _module, _given, out):
        return out * factor

    return lambda module: module[1].register_forward_hook(partial(times, factor))


def wrapped_hook(module):
    @wraps(nn.Linear.forward)  # copies the name of the library's module
    def times(_module, _given, out):
        return out * 2

    module[1].register_forward_hook(times)


def calls(other):
    return lambda module: module[1].register_forward_hook(lambda _, __, out: out + other(out))


def packed(factor):
    layer = constant(factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.ao
        warnings.simplefilter("ignore", UserWarning)
        return [torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear})]


def pack(module):
    set_in("packed", packed(2.0))(module)


DECIDES = {
    "a parameter": lambda module: module[1].weight.data.view(-1)[17:18].add_(1e-3),
    "a parameter's dtype": lambda module: module[1].bfloat16(),
    "a buffer that is not saved": lambda module: module[1].inv_freq.mul_(0.5),
    "a tensor that is no buffer": lambda module: module[1].original_inv_freq.mul_(0.5),
    "a shape": lambda module: set_in("weight", nn.Parameter(module[1].weight.view(4, 16)))(module),
    "the order of layers": swap,
    "a layer less": lambda module: module.pop(2),
    "a number": set_in("epsilon", 1e-5),
    "none and a number": set_in("window", 4),
    "a number in a dictionary": lambda module: module[1].scaling.update(default=0.0),
    "a text in a list": lambda module: module[1].active.append("other"),
    "an attribute that is new": set_in("disabled", True),
    "a class": other_class,
    "a forward of its own": own_forward(2.0),
    "a hook": lambda module: module[1].register_forward_hook(lambda _, __, out: out * 2),
    "a hook before": lambda module: module[1].register_forward_pre_hook(lambda _, given: given),
    "a module in a list": set_in("hidden", [nn.Linear(2, 2)]),
    "an operator": set_in("activation", torch.tanh),
    "what a tensor carries": carries,
    "a hook with arguments": partial_hook(2.0),
    "a hook under a library's name": wrapped_hook,
    "a hook with other arguments": partial_hook(3.0),
    "a hook that calls a module": calls(nn.Linear(8, 8)),
    "packed weights": pack,
    "a type of norm": lambda module: module.append(nn.LayerNorm(8)),
}


@pytest.mark.parametrize("what", DECIDES)
def test_what_decides_changes_it(what):
    module = model()
    before = model_identity(module)
    DECIDES[what](module)
    assert model_identity(module) != before


def test_code_with_other_constants_or_closures_is_other_code():
    told = set()
    for factor in (2.0, 3.0):
        module = model()
        own_forward(factor)(module)
        told.add(model_identity(module))
    for hook in (lambda *_: None, lambda *_: 1):
        module = model()
        module.register_forward_hook(hook)
        told.add(model_identity(module))
    assert len(told) == 4


@pytest.mark.parametrize("change", [partial_hook, lambda factor: set_in("packed", packed(factor)),
                                    lambda factor: calls(constant(factor))])  # fmt: skip
def test_what_hooks_and_packed_layers_hold_is_read(change):
    told = []
    for factor in (2.0, 2.0, -3.0):
        module = model()
        change(factor)(module)
        told.append(model_identity(module))
    assert told[0] == told[1] != told[2]


def constant(factor):
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, factor)
    nn.init.zeros_(layer.bias)
    return layer


def test_functions_that_code_reads_are_followed(monkeypatch):
    module = model()
    module[1].register_forward_hook(reads)
    before = model_identity(module)
    assert model_identity(module) == before
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    other = model_identity(module)
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda out: out + 1)
    assert len({before, other, model_identity(module)}) == 3


FACTOR = 2.0


def helper(out):
    return out * FACTOR


def reads(_module, _given, out):
    return helper(out)


@pytest.mark.parametrize(
    ("place", "name"),
    [(nn.Linear, "forward"), (nn.functional, "linear"), (nn.Linear, "extra_repr")],
)
def test_code_in_the_place_of_a_librarys(monkeypatch, place, name):
    module = model().append(nn.Linear(8, 8))
    before = model_identity(module)
    monkeypatch.setattr(place, name, lambda *_: None)
    assert model_identity(module) != before
    monkeypatch.undo()
    assert model_identity(module) == before


def test_settings_of_the_thread_and_the_process():
    module = model()
    before = model_identity(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model_identity(module) != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert model_identity(module) != before
    kept = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # torch's own getter raises then
    try:
        assert model_identity(module) != before
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = kept
    torch.set_float32_matmul_precision("highest")  # as it is
    assert model_identity(module) == before


def dynamic_model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_table_of_dynamic_positions():
    module = dynamic_model()
    before = model_identity(module)
    module(torch.arange(50)[None])  # computes another one, for long texts
    assert model_identity(module) == before
    module(torch.arange(9)[None])
    assert model_identity(module) == before
    module.model.rotary_emb.inv_freq = module.model.rotary_emb.inv_freq * 1.5
    assert model_identity(module) != before


def test_functions_of_libraries_are_told_apart_by_their_names():
    told = set()
    for function in (torch.relu, torch.tanh, torch.ops.aten.relu, torch.ops.aten.tanh,
                     nn.functional.relu, nn.functional.silu):  # fmt: skip
        module = model()
        module[1].activation = function
        told.add(model_identity(module))
    assert len(told) == 6


def test_a_configuration_in_any_attribute_counts():
    told = set()
    for theta in (1.0, 2.0):
        module = model()
        module[1].text_config = LlamaConfig(rope_parameters={"rope_theta": theta})
        told.add(model_identity(module))
        module[1].text_config.use_cache = False
        told.add(model_identity(module))
    assert len(told) == 2


def test_what_is_deep_in_a_configuration_counts():
    told = set()
    for value in (1, 2):
        nested = value
        for _ in range(12):
            nested = [{"a": nested}]
        module = model()
        module[1].config = LlamaConfig(anything=nested)
        told.add(model_identity(module))
    assert len(told) == 2


def test_weights_of_a_module_in_a_list_count():
    told = set()
    for value in (1.0, 2.0):
        module, hidden = model(), nn.Linear(2, 2)
        nn.init.constant_(hidden.weight, value)
        nn.init.zeros_(hidden.bias)
        module[0].hidden = [hidden, module]  # and itself, which ends nowhere
        told.add(model_identity(module))
    assert len(told) == 2


def transpose(module):
    with torch.no_grad():
        weight = module[1].weight
        weight.set_(weight.t().contiguous().t())
    assert not module[1].weight.is_contiguous()


def untie(module):
    module[2].weight = nn.Parameter(module[2].weight.detach().clone())


DECIDES_NOTHING = {
    "strides": transpose,
    "the same numbers in other memory": untie,
    "persistence": lambda module: module[1].register_buffer("inv_freq", torch.arange(4.0)),
    "training": lambda module: module.train(mode=False),
    "where it was loaded from": set_in("name_or_path", "elsewhere"),
    "gradients": lambda module: module.requires_grad_(requires_grad=False),
    "hooks of libraries": lambda module: module[1].register_forward_hook(nn.Identity()),
}


@pytest.mark.parametrize("what", DECIDES_NOTHING)
def test_what_decides_nothing_does_not(what):
    module = model()
    before = model_identity(module)
    DECIDES_NOTHING[what](module)
    assert model_identity(module) == before


def test_compiling_does_not_count():
    module = model()
    assert model_identity(torch.compile(module, backend="eager")) == model_identity(module)


def test_every_byte_is_read(monkeypatch):
    """Also of what is read in pieces: the first, the last, and between."""
    monkeypatch.setattr(values, "PIECE", 64)
    module = nn.Linear(33, 3)
    with torch.no_grad():
        module.weight.zero_()
    raw = module.weight.detach().view(-1).view(torch.uint8)
    told = {model_identity(module)}
    for at in (0, 1, 63, 64, 200, len(raw) - 1):
        raw[at] = 1
        told.add(model_identity(module))
        raw[at] = 0
    assert len(told) == 7


def test_tied_memory_is_read_once(monkeypatch):
    read = []
    digest = values._tensor_digest

    def reading(name, tensor, each):
        read.append(name)
        return digest(name, tensor, each)

    monkeypatch.setattr(values, "_tensor_digest", reading)
    tied = llama(tie_word_embeddings=True)
    model_identity(tied)
    assert len(read) == len(set(read)) == len({p.data_ptr() for p in tied.parameters()}) + 2
    assert "lm_head.weight" not in read


@pytest.mark.model
def test_a_model_has_it_wherever_and_however_often_it_is_loaded(tmp_path):
    tiny = bundled_model()
    shutil.copytree(tiny, tmp_path / "copy")
    one = AutoModelForCausalLM.from_pretrained(tiny)
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    identity = model_identity(one)
    assert is_loaded(identity)
    assert model_identity(two) == identity
    two(torch.arange(9)[None], output_hidden_states=True)  # for which Transformers adds hooks
    two.config.use_cache, two.config.pad_token_id = False, 7
    two.generation_config.temperature = 3.0
    assert model_identity(two) == identity
    assert model_identity(two.float()) != identity


@pytest.mark.model
def test_it_is_of_what_was_loaded_and_not_of_the_files(tmp_path):
    """`config.json` is read, and the weights are replaced, between loading and asking."""
    folder = tmp_path / "tiny"
    shutil.copytree(bundled_model(), folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    before = model_identity(loaded)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    assert model_identity(loaded) == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "original_max_position_embeddings": 16},
    ],
)  # fmt: skip
def test_a_rope_that_was_recomputed_for_a_long_text_is_the_same_model(rope):
    """KV is kept below that length alone, where the table is the first one again."""
    long = llama(rope_parameters={**rope, "rope_theta": 10000.0}, max_position_embeddings=64)
    before = model_identity(long)
    with torch.inference_mode():
        for tokens in (8, 40):
            long(torch.arange(tokens)[None])
            assert model_identity(long) == before


def test_attention_and_precision_are_part_of_it():
    plain = llama()
    before = model_identity(plain)
    plain.set_attn_implementation("eager")
    assert model_identity(plain) != before
    plain.set_attn_implementation("sdpa")
    assert model_identity(plain) == before
    torch.set_float32_matmul_precision("high")
    try:
        assert model_identity(plain) != before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_another_version_of_transformers_is_another_model(monkeypatch):
    plain, simple = llama(), model()
    before = model_identity(plain), model_identity(simple)
    monkeypatch.setattr("kvkeep.store.identity.modules.version", lambda _: "99.0")
    assert model_identity(plain) != before[0]
    assert model_identity(simple) == before[1]  # in which nothing of Transformers computes


def test_addresses_are_no_part_of_it():
    """What is in it is the same in every process."""
    odd = model()
    odd[1].register_forward_hook(lambda _, __, out: out)
    odd[1].activation, odd[1].object = torch.nn.functional.silu, threading_like()
    odd[1].names = {"b", "a", "c"}
    assert not [line for line in lines_of(odd) if " at 0x" in line]


def threading_like():
    class Thing:
        __slots__ = ("lock",)

    return Thing()


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    with pytest.raises(InvalidValue, match="'weight' are on no device"):
        model_identity(module)
    module = nn.Module()
    module.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(InvalidValue, match="strided"):
        model_identity(module)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match=r"torch\.nn\.Module or a path, got int"):
        model_identity(7)
    with pytest.raises(InvalidValue, match="no such file or directory"):
        model_identity(tmp_path / "nowhere")


# --- adapters --------------------------------------------------------------------------------


def with_adapter(alpha=16, seed=1):
    """As PEFT makes it, with PEFT where it is installed."""
    peft = pytest.importorskip("peft")
    adapted = llama()
    torch.manual_seed(seed)
    how = {"r": 4, "lora_alpha": alpha, "init_lora_weights": False}
    adapted.add_adapter(peft.LoraConfig(**how, target_modules=["q_proj", "v_proj"]))
    return adapted.eval()


def test_adapters_with_scaling_state_and_weights_are_part_of_it():
    told = {model_identity(llama())}
    told |= {model_identity(with_adapter(**how)) for how in ({}, {"alpha": 64}, {"seed": 2})}
    adapted = with_adapter()
    assert model_identity(adapted) in told
    adapted.disable_adapters()
    told.add(model_identity(adapted))
    assert len(told) == 5
    adapted.enable_adapters()
    assert model_identity(adapted) == model_identity(with_adapter())


# --- directories -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(bundled_model(), tmp_path / "tiny")
    return tmp_path / "tiny"


def edit(**fields):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def write(name, content="{}"):
    return lambda folder: (folder / name).write_text(content)


def copy_weights(name):
    return lambda folder: shutil.copy(folder / "model.safetensors", folder / name)


FILES_DECIDE = {
    "rope": edit(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
    "epsilon": edit(rms_norm_eps=1e-2),
    "an adapter's settings": write("adapter_config.json", '{"lora_alpha": 64}'),
    "an adapter's weights": copy_weights("adapter_model.safetensors"),
    "more weights": copy_weights("extra.safetensors"),
    "quantisation": write("hf_quant_config.json"),
    "code": write("modeling_own.py", "x = 1"),
    "weights": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-1] + b"\7"
    ),
}
FILES_DECIDE_NOTHING = {
    "a tokenizer": write("tokenizer.json"),
    "settings of generation": write("generation_config.json"),
    "a text": write("README.md", "hello"),
    "pickled weights that nobody takes": write("pytorch_model.bin", "pickle"),
    "what a trainer leaves": write("optimizer.pt", "pickle"),
}


@pytest.mark.parametrize("what", [*FILES_DECIDE, *FILES_DECIDE_NOTHING])
def test_files_that_decide_are_part_of_a_directorys(folder, what):
    before = model_identity(folder)
    assert not is_loaded(before)
    (FILES_DECIDE | FILES_DECIDE_NOTHING)[what](folder)
    assert (model_identity(folder) != before) == (what in FILES_DECIDE)


def test_names_of_files_beside_a_model_cannot_be_mistaken_for_contents(folder):
    write("a.json", "b.json=1")(folder)
    told = {model_identity(folder)}
    (folder / "a.json").rename(folder / "b.json")
    told.add(model_identity(folder))
    assert len(told) == 2


def test_one_file_of_weights_is_its_own(folder):
    alone = model_identity(folder / "model.safetensors")
    assert alone != model_identity(folder)
    edit(rms_norm_eps=1e-2)(folder)
    assert model_identity(folder / "model.safetensors") == alone
