"""A geometry from a Hugging Face configuration: what each layer caches, or a refusal.

A ``config.json`` leaves out what its family defaults to, and names the same number differently in
each family, so the class of the family in Transformers reads it, where that is installed: this
module is the one place that imports Transformers here, late. No code of a checkpoint runs. Without
Transformers, and for a few families that it does not know, the written fields are read, and a
missing one is refused by name.

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
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import InvalidValue, MissingExtra, UnsupportedModel, reason, require, told
from kvkeep.core.geometry.groups import AttentionShape, GroupKind, LayerGroup, StateTensor
from kvkeep.core.geometry.shape import ConfigSource, KVGeometry
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

# --- families that are read from the written fields alone ---------------------------------------

# They store K and V, or a latent, of one shape in every layer.
_DIVIDING: Final = {  # a head has hidden_size / num_attention_heads elements unless one is named
    "", "gpt2", "internlm2", "llama", "minicpm", "mistral", "mixtral", "olmo2", "phi3", "plamo",
    "qwen2", "qwen2_moe",
}  # fmt: skip
_NAMING: Final = {  # they name head_dim
    "chatglm", "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "minimax_m2", "qwen3",
    "qwen3_moe",
}  # fmt: skip
_LATENT: Final = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
_SLIDING: Final = {"", "mistral", "mixtral", "phi3"}  # every layer slides
# Field → the name of it in the family; "" is the ``params.json`` of Mistral.
_NAMES: Final[dict[str, dict[str, str]]] = {
    "": {
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "hidden_size": "dim",
    },
    "chatglm": {
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
    },
    "gpt2": {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_head",
        "hidden_size": "n_embd",
    },
}

# Families that no field gives away, "_text" left out, and what they keep.
_REFUSED: Final[dict[str, str]] = {
    "blt": "keeps KV of bytes and of patches",
    "cpmant": "attends in both directions over its prompt",
    "diffusion_gemma": "generates by diffusion, over a canvas that attends in both directions",
    "inkling": "keeps states of convolutions inside its attention",
    "inkling2": "keeps states of convolutions inside its attention",
    "openai-gpt": "keeps no KV cache",
    "recurrent_gemma": "keeps a recurrent state in its modules, outside of caches",
    "reformer": "keeps hashes and hidden states",
    "rwkv": "keeps a recurrent state of a form that is not known",
    "xlnet": "keeps hidden states of the text before",
    "xlstm": "keeps a recurrent state of a form that is not known",
    "zaya": "keeps states of convolutions and a delayed value inside its attention",
}
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
_KERNEL_CHUNK: Final = 64  # of delta rules
_State = tuple[tuple[StateTensor, ...], int]


class ConfigFields:
    """The fields of a configuration, read by type; a null field counts as missing.

    A field of another type raises `UnsupportedModel` with its name and value.
    """

    def __init__(self, source: object, advice: str = "") -> None:
        self._source = source
        self._advice = advice

    @property
    def family(self) -> str:
        """The model type, such as "llama" or "gemma3_text"; empty if the configuration has none."""
        return self.text("model_type")

    @property
    def base_family(self) -> str:
        """The model type without "_text", which the text parts of multimodal models add."""
        return self.family.removesuffix("_text")

    def __contains__(self, name: str) -> bool:
        return self.value(name) is not None

    def value(self, name: str) -> Any:
        """Return the field as it is; None if it is missing."""
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        return getattr(self._source, name, None)

    def number(self, *names: str, least: int = 1) -> int | None:
        """Return the first existing field of ``names``, an int of at least ``least``; else None."""
        for name in names:
            if (value := self.value(name)) is not None:
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

    def text(self, name: str) -> str:
        """Return a text field; empty if it is missing."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "text")
        return value or ""

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts; empty if it is missing."""
        value = self.value(name) or []
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return list(value)

    def flag(self, name: str) -> bool:
        """Whether the field exists and is not false, zero or empty."""
        return bool(self.value(name))

    def part(self, name: str) -> ConfigFields | None:
        """Return a nested configuration; None if it is missing."""
        value = self.value(name)
        return None if value is None else ConfigFields(value, self._advice)

    def _wrong(self, name: str, right: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{name} is {told(self.value(name))} in the configuration; {right} is needed"
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
    _check_layers(source)
    try:
        transformers = require("transformers", "transformers")
    except MissingExtra:
        transformers = None
    made = None if transformers is None else _made(source, transformers)
    whole = ConfigFields(source if made is None else made)
    _check_generates(whole)
    if transformers is None or made is None:
        whole = text = _written(_dictionary(source), transformers)
    else:
        text = ConfigFields(_text_part(made, transformers))
        _check_decodes(whole, text)
    computed, notes = _dtype(whole, text, folder)
    notes += _cache_scheme(whole, folder)
    layers = _layers(text)
    _check_servable(text)
    groups = [group.with_dtype(computed) for group in _groups(text, layers)]
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


def _check_layers(source: object) -> None:
    """Refuse numbers of layers that no model has, in the configuration and in its parts."""
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    usual = "num_hidden_layers"
    names = dict.fromkeys((usual, *(others.get(usual, usual) for others in _NAMES.values())))
    for part in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        for name in names:
            layers = part.get(name)
            if isinstance(layers, int) and layers > _MOST_LAYERS:
                raise UnsupportedModel(f"{name} is {layers:,}; at most {_MOST_LAYERS:,} are read")


def _check_generates(whole: ConfigFields) -> None:
    if whole.flag("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{whole.family} is an encoder-decoder, whose cross-attention keeps KV of the input "
            "too; a decoder-only model is needed"
        )
    architectures = whole.texts("architectures")
    if architectures and all(_NOT_GENERATING.search(name) for name in architectures):
        raise UnsupportedModel(f"{', '.join(architectures)} does not generate text")


def _dictionary(source: Any) -> Mapping[str, Any]:
    return source if isinstance(source, Mapping) else source.to_dict()


# --- through Transformers -------------------------------------------------------------------------


def _made(source: object, transformers: ModuleType) -> Any:
    """Return the configuration object of Transformers; None if it does not know the family."""
    if isinstance(source, transformers.PretrainedConfig) and type(source).__module__.startswith(
        "transformers."
    ):
        return source
    fields = _dictionary(source)
    family = ConfigFields(fields).family
    if family not in transformers.CONFIG_MAPPING:
        return None
    try:
        return transformers.CONFIG_MAPPING[family].from_dict(copy.deepcopy(dict(fields)))
    except Exception as error:
        raise _unreadable(family, error, transformers) from error


def _text_part(config: Any, transformers: ModuleType) -> Any:
    try:
        return config.get_text_config(decoder=True)
    except Exception as error:
        raise _unreadable(config.model_type, error, transformers) from error


def _unreadable(family: str, error: Exception, transformers: ModuleType) -> UnsupportedModel:
    # Validators of Transformers put the cause into the last line.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return UnsupportedModel(
        f"Transformers {transformers.__version__} does not read this configuration of {family}: "
        f"{lines[-1].strip()}"
    )


def _check_decodes(whole: ConfigFields, text: ConfigFields) -> None:
    """Refuse families for which Transformers has no model that generates text."""
    auto = require("transformers.models.auto.modeling_auto", "transformers")
    families = {whole.family, text.family}
    if not any(families & set(getattr(auto, name, ())) for name in _GENERATING_CLASSES):
        raise UnsupportedModel(f"{whole.family} does not generate text: it keeps no KV cache")
    encoders = {*getattr(auto, _ENCODER_CLASSES), "bert-generation"}
    if text.family in encoders and not text.flag("is_decoder"):
        raise UnsupportedModel(f"{text.family} is an encoder: it keeps no KV cache")


def _layers(text: ConfigFields) -> list[ConfigFields]:
    layers = text.needed("num_hidden_layers")
    by_layer = text.value("per_layer_config")
    if by_layer is None:
        return [text] * layers
    if isinstance(by_layer, Mapping | list | str | int | float):  # as written: nobody has read it
        raise UnsupportedModel(
            f"{text.family} has layers of different shapes (per_layer_config), which a newer "
            "Transformers reads: pip install -U transformers"
        )
    return [ConfigFields(by_layer[layer]) for layer in range(layers)]


# --- without Transformers -------------------------------------------------------------------------


def _written(fields: Mapping[str, Any], transformers: ModuleType | None) -> ConfigFields:
    """Return the fields under their usual names, or refuse what the file alone does not decide."""
    family = ConfigFields(fields).family
    advice = f"; {family or 'this configuration'} needs it to be written"
    if transformers is None:
        advice += ", or Transformers, which knows its default: pip install 'kvkeep[transformers]'"
    if not family and "n_layers" not in fields:
        raise UnsupportedModel("the configuration names no model_type, which says what it caches")
    if family not in _DIVIDING | _NAMING | _LATENT:
        raise _unknown(family, transformers)
    names = _NAMES.get(family, {})
    usual = dict(fields) | {name: fields.get(given) for name, given in names.items()}
    usual.setdefault("dtype", fields.get("torch_dtype"))
    read = ConfigFields(usual, advice)
    if family == "plamo":
        usual["num_key_value_heads"] = -(
            -read.needed("num_attention_heads") // read.needed("n_shared_head")
        )
    if family in _LATENT or "kv_lora_rank" in read:
        read.needed("kv_lora_rank")
    else:
        read.needed("num_key_value_heads")
        _check_head_dim(read, family)
    if read.value("use_sliding_window") is False:
        usual["sliding_window"] = None
    slides = read.number("sliding_window", least=0) and not read.texts("layer_types")
    if slides and family not in _SLIDING:
        raise UnsupportedModel(
            f"the configuration (model_type {family!r}) has a sliding_window and names no "
            f"layer_types{advice}"
        )
    return read


def _check_head_dim(read: ConfigFields, family: str) -> None:
    if family in _NAMING:
        read.needed("head_dim")
    elif "head_dim" not in read:
        hidden, heads = read.needed("hidden_size"), read.needed("num_attention_heads")
        if hidden % heads:
            raise UnsupportedModel(
                f"{heads} attention heads do not divide a hidden size of {hidden}, and the "
                "configuration names no head_dim"
            )


def _unknown(family: str, transformers: ModuleType | None) -> UnsupportedModel:
    if transformers is None:
        return UnsupportedModel(
            f"Transformers is not installed, which knows what a model of the family {family!r} "
            "caches: pip install 'kvkeep[transformers]'"
        )
    return UnsupportedModel(
        f"Transformers {transformers.__version__} does not know the family {family!r}, and code "
        "that comes with a checkpoint is not run, so what it caches is not known; if every layer "
        'caches K and V of one shape, write that as a config.json: {"model_type": "llama", '
        '"num_hidden_layers": …, "num_attention_heads": …, "num_key_value_heads": …, '
        '"head_dim": …}'
    )


# --- element types --------------------------------------------------------------------------------


def _dtype(
    whole: ConfigFields, text: ConfigFields, folder: Path | None
) -> tuple[str, tuple[str, ...]]:
    """Return the type in which the model computes, and a note if nothing names it."""
    for fields in (whole, text):  # in the order of Transformers and vLLM
        if (named := fields.value("dtype")) is not None:
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


def _cache_scheme(whole: ConfigFields, folder: Path | None) -> tuple[str, ...]:
    """Return a note if the checkpoint asks for a quantised KV cache."""
    quantised: Any = whole.value("quantization_config")
    if quantised is None and folder is not None and (folder / "hf_quant_config.json").is_file():
        quantised = _read_file(folder / "hf_quant_config.json")[0].get("quantization")
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = ConfigFields(quantised).value(name)
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


def _check_servable(text: ConfigFields) -> None:
    """Refuse a model that keeps something of no known kind."""
    if text.base_family in _REFUSED:
        raise UnsupportedModel(
            f"{text.family} {_REFUSED[text.base_family]}; K and V or a latent of each token, and "
            "states of known families are supported"
        )
    for mark, kept in _MARKS.items():
        if text.flag(mark):
            raise UnsupportedModel(f"{text.family} keeps {kept} (it sets {mark})")


def _groups(text: ConfigFields, layers: list[ConfigFields]) -> Iterator[LayerGroup]:
    """Yield a group for each layer and each thing that it caches."""
    for number, (kinds, layer) in enumerate(zip(_kinds(text, layers), layers, strict=False)):
        if skipped := layer.value("skip"):
            raise UnsupportedModel(f"{text.family} skips {skipped} in layer {number}")
        for kind in kinds:
            if kind == "state":
                if (reader := _STATES.get(layer.base_family)) is None:
                    raise UnsupportedModel(
                        f"{layer.family} has layers with a state of a form that is not known; the "
                        f"states of these families are known: {', '.join(_STATES)}"
                    )
                state, grid = reader(layer)
                yield LayerGroup("state", (number,), state=state, grid=grid)
            else:
                yield _attention(number, kind, layer)


def _kinds(text: ConfigFields, layers: list[ConfigFields]) -> list[tuple[GroupKind, ...]]:
    """Return what each layer caches, as the caches of Transformers decide it."""
    types = text.texts("layer_types") or text.texts("layers_block_type")
    if not types:
        if text.base_family in _STATES:
            text.needed("layer_types")
        local = text.texts("attention_layers")  # GPT-Neo
        types = [_only_type(layer, number, local) for number, layer in enumerate(layers)]
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
    return [_KINDS[name] for name in types[: len(types) - shared]]


def _only_type(layer: ConfigFields, number: int, local: list[str]) -> str:
    if layer.number("sliding_window", least=0) or (local and local[number] == "local"):
        return "sliding_attention"
    return "chunked_attention" if layer.flag("attention_chunk_size") else "full_attention"


def _attention(number: int, kind: GroupKind, layer: ConfigFields) -> LayerGroup:
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
    shape = AttentionShape(heads, _head_dim(layer), layer.number("v_head_dim"))
    return LayerGroup(kind, (number,), shape, span)


def _kv_heads(layer: ConfigFields) -> int:
    if layer.family == "falcon" and not layer.flag("new_decoder_architecture"):
        return 1 if layer.flag("multi_query") else layer.needed("num_attention_heads")
    attention = layer.part("attn_config")  # MPT
    nested = attention.number("kv_n_heads") if attention is not None else None
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return nested or layer.needed(*names)


def _head_dim(layer: ConfigFields) -> int:
    named = layer.number("head_dim")
    return named or layer.needed("hidden_size") // layer.needed("num_attention_heads")


def _conv(kernel: int, parts: tuple[int, ...], units: tuple[int, ...] = ()) -> StateTensor:
    return StateTensor("conv", (sum(parts), kernel), "bfloat16", 0, parts, units, follows=True)


def _recurrent(*shape: int) -> StateTensor:
    return StateTensor("recurrent", shape, "float32", 0)


def _delta(fields: ConfigFields) -> _State:
    """Delta rule: Qwen3-Next, Qwen3.5, OLMo Hybrid; with heads of one kind Kimi Linear, Bailing."""
    keys = fields.needed("linear_num_key_heads", "linear_num_heads")
    values = fields.needed("linear_num_value_heads", "linear_num_heads")
    key_dim = fields.needed("linear_key_head_dim", "linear_head_dim")
    value_dim = fields.needed("linear_value_head_dim", "linear_head_dim")
    parts = (keys * key_dim, keys * key_dim, values * value_dim)
    conv = _conv(fields.needed("linear_conv_kernel_dim"), parts, (keys, keys, values))
    return (conv, _recurrent(values, key_dim, value_dim)), _KERNEL_CHUNK


def _mamba2(fields: ConfigFields) -> _State:
    """Mamba-2: a convolution over x, B and C, and a state of each head."""
    heads = fields.needed("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    width = fields.needed("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    size = fields.needed("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.needed("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = fields.needed("mamba_d_conv", "conv_kernel")
    conv = _conv(kernel, (heads * width, groups * size, groups * size), (heads, groups, groups))
    grid = fields.needed("mamba_chunk_size", "chunk_size")
    return (conv, _recurrent(heads, width, size)), grid


def _mamba(fields: ConfigFields) -> _State:
    """Mamba: a state for each inner channel, which heads divide in Zamba."""
    if expand := fields.number("mamba_expand"):
        inner = expand * fields.needed("hidden_size")
    else:
        inner = fields.needed("intermediate_size")
    size = fields.needed("mamba_d_state", "state_size")
    heads = fields.number("n_mamba_heads")
    shape = (inner, size) if heads is None else (heads, inner // heads, size)
    return (_conv(fields.needed("mamba_d_conv", "conv_kernel"), (inner,)), _recurrent(*shape)), 1


def _short_conv(fields: ConfigFields) -> _State:
    """Short convolutions of LFM: nothing recurs."""
    return (_conv(fields.needed("conv_L_cache"), (fields.needed("hidden_size"),)),), 1


def _lightning(fields: ConfigFields) -> _State:
    """Lightning attention of MiniMax, whose state is in the model's dtype."""
    heads = fields.needed("num_attention_heads")
    width = fields.number("head_dim") or fields.needed("hidden_size") // heads
    shape = (heads, width, width)
    return (StateTensor("recurrent", shape, "bfloat16", 0, follows=True),), 1


_READERS: Final[dict[Callable[[ConfigFields], _State], str]] = {
    _delta: "qwen3_next qwen3_5 qwen3_5_moe olmo_hybrid kimi_linear bailing_hybrid",
    _mamba2: "falcon_h1 bamba granitemoehybrid mamba2 zamba2 nemotron_h",
    _mamba: "mamba falcon_mamba jamba zamba",
    _short_conv: "lfm2 lfm2_moe lfm3",
    _lightning: "minimax",
}
"""How to read one layer's state, for the model types without "_text"."""
_STATES: Final = {family: reader for reader, names in _READERS.items() for family in names.split()}
