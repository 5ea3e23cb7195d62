"""A geometry from a Hugging Face configuration: what each layer caches, or a refusal.

A ``config.json`` leaves out what its family defaults to, and names the same number differently in
each family, so the class of the family in Transformers reads it, where that is installed: this
module is the one place that imports Transformers here, late. No code of a checkpoint runs. Without
Transformers, and for a few families that it does not know, the written fields are read, and a
missing one is refused by name. What no field says is in `_FAMILIES`, a row for each family.

The tests compare what is read with the caches that Transformers fills. What cannot be read for
certain is refused: a geometry that is almost right makes wrong pages.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.errors import InvalidValue, MissingExtra, UnsupportedModel, reason, require, told
from kvkeep.core.geometry.shape import (
    AttentionShape,
    ConfigSource,
    GroupKind,
    KVGeometry,
    LayerGroup,
    StateTensor,
)
from kvkeep.core.geometry.units import DTYPES, normalise_dtype

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["download_hint", "read_geometry"]


_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", re.ASCII)
# A model that computes in one byte an element does not exist: such a type is that of its weights.
_COMPUTE: Final = "bfloat16"
_MOST_LAYERS: Final = 10_000  # lists of their kinds are made before a size is known
_HEADER_BYTES: Final = 100 << 20  # the most that safetensors allows
_WEIGHTS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NOT_GENERATING: Final = re.compile(
    r"For(MaskedLM|\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|CTC)$"
)
_ENCODER_CLASSES: Final = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
_GENERATING_CLASSES: Final = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)

# Fields set only by models that keep something of no known kind, and what that is.
_MARKS: Final[dict[str, str]] = {
    "add_cross_attention": "keys and values of another input",
    "cross_attention_layers": "keys and values of images in some layers",
    "index_head_dim": "an index key beside K and V",
    "indexer_head_dim": "an index key beside K and V",
    "compress_ratios": "compressed tokens",
    "compress_rates": "compressed tokens",
}
# Kinds of layers in configurations → ours: attention "full", "window" or "chunk", and "state".
_KINDS: Final[dict[str, tuple[GroupKind, ...]]] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "sliding_attention": ("window",),
    "chunked_attention": ("chunk",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "conv": ("state",),
    "hybrid": ("full", "state"),
    "mlp": (),
    "moe": (),
}


class _Fields:
    """The fields of a configuration, read by type; a null field counts as missing.

    A field of another type raises `UnsupportedModel` with its name and value.
    """

    def __init__(self, source: object, advice: str = "") -> None:
        self._source = source
        self._advice = advice

    def get(self, name: str) -> Any:
        """Return the field as it is; None if it is missing."""
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        return getattr(self._source, name, None)

    @property
    def family(self) -> str:
        """The model type, such as "llama" or "gemma3_text"; empty if the configuration has none."""
        family = self.get("model_type")
        if family is not None and not isinstance(family, str):
            raise self._wrong("model_type", "text")
        return family or ""

    @property
    def row(self) -> _Family:
        """What is known of the family; the text part of a multimodal model adds "_text" to it."""
        return _FAMILIES.get(self.family.removesuffix("_text"), _Family())

    def number(self, *names: str, least: int = 1) -> int | None:
        """Return the first existing field of ``names``, an int of at least ``least``; else None."""
        for name in names:
            if (value := self.get(name)) is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise self._wrong(name, f"one whole number of at least {least} for all layers")
                return value
        return None

    def needed(self, *names: str) -> int:
        """Return `number`, or raise if no field exists."""
        number = self.number(*names)
        if number is None:
            raise UnsupportedModel(
                f"the configuration (model_type {self.family!r}) names no {names[0]}{self._advice}"
            )
        return number

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts; empty if it is missing."""
        value = self.get(name) or []
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return list(value)

    def _wrong(self, name: str, right: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{name} is {told(self.get(name))} in the configuration; {right} is needed"
        )


def read_geometry(config: ConfigSource, *, dtype: str | None, tp: int) -> KVGeometry:
    """See `KVGeometry.from_config`."""
    folder = None
    source: object = config
    if isinstance(config, str | os.PathLike):
        source, folder = _read_file(Path(config))
    elif not isinstance(config, Mapping) and not callable(getattr(config, "to_dict", None)):
        raise InvalidValue(
            f"config is {type(config).__name__}; a Hugging Face configuration, its dictionary, "
            "or the path of its config.json or model directory is needed"
        )
    whole, text = _read(source)
    computed, notes = _dtype(whole, text, folder)
    notes += _cache_scheme(whole, folder)
    groups = [group.with_dtype(computed) for group in _groups(text)]
    if not groups:
        raise UnsupportedModel(f"{text.family} has no layer that keeps anything")
    notes = notes if dtype is None else ()
    return KVGeometry.of(groups, dtype=dtype or computed, tp=tp, notes=notes)


def download_hint(path: str | os.PathLike[str]) -> str:
    """Return the end of a message about ``path``, where no model is.

    It says how to get the files if ``path`` may be a name on the hub: two parts, and nothing is
    there. Otherwise it is empty. Uses no network.
    """
    name = str(path)
    if not _HUB_NAME.fullmatch(name) or Path(path).exists():
        return ""
    folder = name.partition("/")[2]
    return (
        f"; a local directory is needed. If {name} is a name on the Hugging Face hub, get its "
        f"files with: hf download {name} --local-dir {folder}"
    )


# --- what a configuration says ------------------------------------------------------------------


def _read(source: Any) -> tuple[_Fields, _Fields]:
    """Return the fields of a model, and those of the part that generates text."""
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else source.to_dict()
    for part in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        for name in ("num_hidden_layers", "n_layers", "num_layers", "n_layer"):
            layers = part.get(name)
            if isinstance(layers, int) and layers > _MOST_LAYERS:
                raise UnsupportedModel(f"{name} is {layers:,}; at most {_MOST_LAYERS:,} are read")
    try:
        transformers = require("transformers", "transformers")
    except MissingExtra:
        transformers = None
    family = _Fields(fields).family
    theirs = type(source).__module__.startswith("transformers.")
    if transformers is None or not (theirs or family in transformers.CONFIG_MAPPING):
        _check_generates(_Fields(fields))
        written = _written(fields, transformers)
        return written, written
    try:
        if not theirs:
            source = transformers.CONFIG_MAPPING[family].from_dict(copy.deepcopy(dict(fields)))
        _check_generates(_Fields(source))
        text = _Fields(source.get_text_config(decoder=True))
    except UnsupportedModel:
        raise
    except Exception as error:
        # Validators of Transformers put the cause into the last line.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModel(
            f"Transformers {transformers.__version__} does not read this configuration of "
            f"{family}: {lines[-1].strip()}"
        ) from error
    auto = require("transformers.models.auto.modeling_auto", "transformers")
    generating = {name for names in _GENERATING_CLASSES for name in getattr(auto, names, ())}
    if not generating & {family, text.family}:
        raise UnsupportedModel(f"{family} does not generate text: it keeps no KV cache")
    encoders = {*getattr(auto, _ENCODER_CLASSES), "bert-generation"}
    if text.family in encoders and not text.get("is_decoder"):
        raise UnsupportedModel(f"{text.family} is an encoder: it keeps no KV cache")
    return _Fields(source), text


def _check_generates(whole: _Fields) -> None:
    if whole.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{whole.family} is an encoder-decoder, whose cross-attention keeps KV of the input "
            "too; a decoder-only model is needed"
        )
    architectures = whole.texts("architectures")
    if architectures and all(_NOT_GENERATING.search(name) for name in architectures):
        raise UnsupportedModel(f"{', '.join(architectures)} does not generate text")


def _written(fields: Mapping[str, Any], transformers: ModuleType | None) -> _Fields:
    """Return the fields under their usual names, or refuse what the file alone does not decide."""
    family = _Fields(fields).family
    row = _FAMILIES.get(family, _Family())
    advice = f"; {family or 'this configuration'} needs it to be written"
    if transformers is None:
        advice += ", or Transformers, which knows its default: pip install 'kvkeep[transformers]'"
    if not family and "n_layers" not in fields:
        raise UnsupportedModel("the configuration names no model_type, which says what it caches")
    if not row.written:
        if transformers is None:
            raise UnsupportedModel(
                f"Transformers is not installed, which knows what a model of the family {family!r} "
                "caches: pip install 'kvkeep[transformers]'"
            )
        raise UnsupportedModel(
            f"Transformers {transformers.__version__} does not know the family {family!r}, and "
            "code that comes with a checkpoint is not run, so what it caches is not known; if "
            "every layer caches K and V of one shape, write that as a config.json: "
            '{"model_type": "llama", "num_hidden_layers": …, "num_attention_heads": …, '
            '"num_key_value_heads": …, "head_dim": …}'
        )
    usual = dict(fields) | {name: fields.get(given) for name, given in row.names.items()}
    usual.setdefault("dtype", fields.get("torch_dtype"))
    if usual.get("use_sliding_window") is False:
        usual["sliding_window"] = None
    read = _Fields(usual, advice)
    if family == "plamo":
        heads, shared = read.needed("num_attention_heads"), read.needed("n_shared_head")
        usual["num_key_value_heads"] = -(-heads // shared)
    for name in row.written:
        read.needed(name)
    if "kv_lora_rank" not in row.written and read.get("head_dim") is None:
        hidden, heads = read.needed("hidden_size"), read.needed("num_attention_heads")
        if hidden % heads:
            raise UnsupportedModel(
                f"{heads} attention heads do not divide a hidden size of {hidden}, and the "
                "configuration names no head_dim"
            )
    slides = read.number("sliding_window", least=0) and not read.texts("layer_types")
    if slides and not row.slides:
        raise UnsupportedModel(
            f"the configuration (model_type {family!r}) has a sliding_window and names no "
            f"layer_types{advice}"
        )
    return read


# --- what each layer caches ---------------------------------------------------------------------


def _groups(text: _Fields) -> Iterator[LayerGroup]:
    """Yield a group for each layer and each thing that it caches, as caches of Transformers do."""
    layers = _layers(text)
    if text.row.refused:
        raise UnsupportedModel(
            f"{text.family} {text.row.refused}; K and V or a latent of each token, and states of "
            "known families are supported"
        )
    for mark, kept in _MARKS.items():
        if text.get(mark):
            raise UnsupportedModel(f"{text.family} keeps {kept} (it sets {mark})")
    for number, (name, layer) in enumerate(zip(_types(text, layers), layers, strict=False)):
        if skipped := layer.get("skip"):
            raise UnsupportedModel(f"{text.family} skips {skipped} in layer {number}")
        for kind in _KINDS[name]:
            if kind != "state":
                yield _attention(number, kind, layer)
                continue
            if layer.row.state is None:
                states = ", ".join(name for name, row in _FAMILIES.items() if row.state)
                raise UnsupportedModel(
                    f"{layer.family} has layers with a state of a form that is not known; the "
                    f"states of these families are known: {states}"
                )
            state, grid = layer.row.state(layer)
            yield LayerGroup("state", (number,), state=state, grid=grid)


def _layers(text: _Fields) -> list[_Fields]:
    layers = text.needed("num_hidden_layers")
    by_layer = text.get("per_layer_config")
    if by_layer is None:
        return [text] * layers
    if isinstance(by_layer, Mapping | list | str | int | float):  # as written: nobody has read it
        raise UnsupportedModel(
            f"{text.family} has layers of different shapes (per_layer_config), which a newer "
            "Transformers reads: pip install -U transformers"
        )
    return [_Fields(by_layer[layer]) for layer in range(layers)]


def _types(text: _Fields, layers: list[_Fields]) -> list[str]:
    """Return the kind, a key of `_KINDS`, of each layer that keeps something of its own."""
    types = text.texts("layer_types") or text.texts("layers_block_type")
    if not types:
        if text.row.state:
            text.needed("layer_types")
        local = text.texts("attention_layers")  # GPT-Neo
        for number, layer in enumerate(layers):
            if layer.number("sliding_window", least=0) or local[number : number + 1] == ["local"]:
                types.append("sliding_attention")
            else:
                chunked = layer.get("attention_chunk_size")
                types.append("chunked_attention" if chunked else "full_attention")
    if unknown := sorted(set(types) - set(_KINDS)):
        raise UnsupportedModel(
            f"{text.family} has layers of type {', '.join(unknown)}; known are {', '.join(_KINDS)}"
        )
    if len(types) != len(layers):
        raise UnsupportedModel(
            f"the configuration has {len(types)} layer types for {len(layers)} layers"
        )
    # The last layers of some families attend over the KV of earlier ones and store none.
    shared = text.number("num_kv_shared_layers", least=0) or 0
    if shared >= len(types):
        raise UnsupportedModel("num_kv_shared_layers leaves no layer that stores KV of its own")
    return types[: len(types) - shared]


def _attention(number: int, kind: GroupKind, layer: _Fields) -> LayerGroup:
    span = None
    if kind == "window":
        span = layer.needed("sliding_window", "window_size")
    elif kind == "chunk":
        span = layer.needed("attention_chunk_size")
    latent_dim = layer.number("kv_lora_rank")
    if latent_dim is not None:
        width = latent_dim + layer.needed("qk_rope_head_dim")
        shape = AttentionShape(1, width, latent_dim=latent_dim)
        return LayerGroup("latent", (number,), shape, span)
    heads = _kv_heads(layer)
    if kind == "window" and layer.family == "mimo_v2_flash":
        heads *= 2  # as its model does
    width = layer.number("head_dim") or (
        layer.needed("hidden_size") // layer.needed("num_attention_heads")
    )
    shape = AttentionShape(heads, width, layer.number("v_head_dim"))
    return LayerGroup(kind, (number,), shape, span)


def _kv_heads(layer: _Fields) -> int:
    if layer.family == "falcon" and not layer.get("new_decoder_architecture"):
        return 1 if layer.get("multi_query") else layer.needed("num_attention_heads")
    nested = _Fields(layer.get("attn_config")).number("kv_n_heads")  # MPT
    return nested or layer.needed("num_key_value_heads", "num_kv_heads", "num_attention_heads")


# --- states ---------------------------------------------------------------------------------------

_State = tuple[tuple[StateTensor, ...], int]  # the tensors, and the grid


def _conv(kernel: int, *parts: tuple[int, int]) -> StateTensor:
    channels = sum(heads * width for heads, width in parts)
    return StateTensor("conv", (channels, kernel), "bfloat16", parts, follows=True)


def _recurrent(*shape: int) -> StateTensor:
    return StateTensor("recurrent", shape, "float32", ((shape[0], 1),))


def _delta(fields: _Fields) -> _State:
    """Delta rule; of heads of one kind, or of another number for keys than for values."""
    keys = fields.needed("linear_num_key_heads", "linear_num_heads")
    values = fields.needed("linear_num_value_heads", "linear_num_heads")
    key_dim = fields.needed("linear_key_head_dim", "linear_head_dim")
    value_dim = fields.needed("linear_value_head_dim", "linear_head_dim")
    kernel = fields.needed("linear_conv_kernel_dim")
    conv = _conv(kernel, (keys, key_dim), (keys, key_dim), (values, value_dim))
    return (conv, _recurrent(values, key_dim, value_dim)), 64  # the chunk of its kernel


def _mamba2(fields: _Fields) -> _State:
    """Mamba-2: a convolution over x, B and C, and a state of each head."""
    heads = fields.needed("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    width = fields.needed("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    size = fields.needed("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.needed("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = fields.needed("mamba_d_conv", "conv_kernel")
    conv = _conv(kernel, (heads, width), (groups, size), (groups, size))
    grid = fields.needed("mamba_chunk_size", "chunk_size")
    return (conv, _recurrent(heads, width, size)), grid


def _mamba(fields: _Fields) -> _State:
    """Mamba: a state for each inner channel, which heads divide in Zamba."""
    if expand := fields.number("mamba_expand"):
        inner = expand * fields.needed("hidden_size")
    else:
        inner = fields.needed("intermediate_size")
    size = fields.needed("mamba_d_state", "state_size")
    heads = fields.number("n_mamba_heads")
    shape = (inner, size) if heads is None else (heads, inner // heads, size)
    return (_conv(fields.needed("mamba_d_conv", "conv_kernel"), (inner, 1)), _recurrent(*shape)), 1


def _short_conv(fields: _Fields) -> _State:
    """Short convolutions: nothing recurs."""
    return (_conv(fields.needed("conv_L_cache"), (fields.needed("hidden_size"), 1)),), 1


def _lightning(fields: _Fields) -> _State:
    """Lightning attention, whose state is in the model's dtype."""
    heads = fields.needed("num_attention_heads")
    width = fields.number("head_dim") or fields.needed("hidden_size") // heads
    state = StateTensor("recurrent", (heads, width, width), "bfloat16", ((heads, 1),), follows=True)
    return (state,), 1


# --- families -------------------------------------------------------------------------------------


class _Family(NamedTuple):
    """What is known of a family besides the fields of its configurations.

    Attributes:
        state: reads a layer's state, in families that have such layers.
        refused: what it keeps that no field gives away, and that is of no known kind.
        written: fields that a file has to name where Transformers does not read it; none: it has
            to. Every layer of these families stores K and V, or a latent, of one shape.
        slides: whether every layer of them slides where a window is given.
        names: usual field → its name in such a file.
    """

    state: Callable[[_Fields], _State] | None = None
    refused: str = ""
    written: tuple[str, ...] = ()
    slides: bool = False
    names: Mapping[str, str] = {}


def _each(names: str, row: _Family) -> dict[str, _Family]:
    return dict.fromkeys(names.split(), row)


_HEADS: Final = ("num_key_value_heads",)
_FAMILIES: Final[dict[str, _Family]] = {
    **_each(
        "qwen3_next qwen3_5 qwen3_5_moe olmo_hybrid kimi_linear bailing_hybrid",
        _Family(state=_delta),
    ),
    **_each(
        "falcon_h1 bamba granitemoehybrid mamba2 zamba2 nemotron_h",
        _Family(state=_mamba2),
    ),
    **_each("mamba falcon_mamba jamba zamba", _Family(state=_mamba)),
    **_each("lfm2 lfm2_moe lfm3", _Family(state=_short_conv)),
    **_each("minimax", _Family(state=_lightning)),
    **_each(
        "internlm2 llama minicpm olmo2 plamo qwen2 qwen2_moe",
        _Family(written=_HEADS),
    ),
    **_each("mistral mixtral phi3", _Family(written=_HEADS, slides=True)),
    **_each(
        "gemma gemma2 gemma3_text glm4_moe gpt_oss minimax_m2 qwen3 qwen3_moe",
        _Family(written=(*_HEADS, "head_dim")),
    ),
    **_each("deepseek_v2 deepseek_v3 kimi_k2", _Family(written=("kv_lora_rank",))),
    "": _Family(  # the ``params.json`` of Mistral
        written=_HEADS,
        slides=True,
        names={
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_kv_heads",
            "hidden_size": "dim",
        },
    ),
    "chatglm": _Family(
        written=(*_HEADS, "head_dim"),
        names={
            "num_hidden_layers": "num_layers",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
        },
    ),
    "gpt2": _Family(
        written=_HEADS,
        names={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "hidden_size": "n_embd",
        },
    ),
    "blt": _Family(refused="keeps KV of bytes and of patches"),
    "cpmant": _Family(refused="attends in both directions over its prompt"),
    "diffusion_gemma": _Family(
        refused="generates by diffusion, over a canvas that attends in both directions"
    ),
    **_each(
        "inkling inkling2", _Family(refused="keeps states of convolutions inside its attention")
    ),
    "openai-gpt": _Family(refused="keeps no KV cache"),
    "recurrent_gemma": _Family(refused="keeps a recurrent state in its modules, outside of caches"),
    "reformer": _Family(refused="keeps hashes and hidden states"),
    **_each("rwkv xlstm", _Family(refused="keeps a recurrent state of a form that is not known")),
    "xlnet": _Family(refused="keeps hidden states of the text before"),
    "zaya": _Family(
        refused="keeps states of convolutions and a delayed value inside its attention"
    ),
}


# --- element types --------------------------------------------------------------------------------


def _dtype(whole: _Fields, text: _Fields, folder: Path | None) -> tuple[str, tuple[str, ...]]:
    """Return the type in which the model computes, and a note if nothing names it."""
    for fields in (whole, text):  # in the order of Transformers and vLLM
        if (named := fields.get("dtype")) is not None:
            dtype = normalise_dtype(named)
            if DTYPES[dtype] > 1:
                return dtype, ()
            return _COMPUTE, (
                f"{dtype} is the type of the weights; {_COMPUTE} is assumed for K and V",
            )
    if folder is not None and (saved := _weights_dtype(folder)) is not None:
        return saved, (f"the configuration names no dtype; {saved} is that of the weights",)
    return _COMPUTE, (
        f"the configuration names no dtype and no weights are beside it; {_COMPUTE} is assumed",
    )


def _cache_scheme(whole: _Fields, folder: Path | None) -> tuple[str, ...]:
    """Return a note if the checkpoint asks for a quantised KV cache."""
    quantised: Any = whole.get("quantization_config")
    if quantised is None and folder is not None and (folder / "hf_quant_config.json").is_file():
        quantised = _read_file(folder / "hf_quant_config.json")[0].get("quantization")
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = _Fields(quantised).get(name)
        if scheme:
            if isinstance(scheme, Mapping):
                scheme = f"{scheme.get('num_bits')}-bit {scheme.get('type')}"
            return (
                f"the checkpoint asks for a KV cache of {scheme} ({name}), which vLLM follows "
                "unless told otherwise and this size does not: for that size give the dtype, as "
                "fp8",
            )
    return ()


# --- files ----------------------------------------------------------------------------------------


def _read_file(path: Path) -> tuple[dict[str, Any], Path]:
    """Return the object in a JSON file, or in the config.json of a directory, and the directory."""
    file = path
    try:
        if path.is_dir():
            file = path / "config.json"
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        hint = download_hint(path) or "; a local model directory or its config.json is needed"
        raise UnsupportedModel(f"cannot read {file}: {reason(error)}{hint}") from error
    try:
        fields = json.loads(content, object_hook=_special_float)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{file} holds {type(fields).__name__}, not a configuration")
    return fields, file.parent


def _special_float(fields: dict[str, Any]) -> object:
    """Return the float that Transformers saves as ``{"__float__": "Infinity"}``."""
    text = fields.get("__float__")
    return float(text) if len(fields) == 1 and isinstance(text, str) else fields


def _weights_dtype(folder: Path) -> str | None:
    """Return the element type of most of the weights in ``folder``; None if no file says it.

    Reads the headers of its safetensors files. Types of one byte are those of quantised weights
    and do not count; nor does another file, such as the pointer that Git LFS leaves.
    """
    elements: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        counts: Counter[str] = Counter()
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= _HEADER_BYTES else {}
            for name, tensor in header.items():
                if name != "__metadata__" and tensor["dtype"] in _WEIGHTS:
                    counts[_WEIGHTS[tensor["dtype"]]] += math.prod(tensor["shape"])
        except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError):
            continue
        elements += counts
    return elements.most_common(1)[0][0] if elements else None
