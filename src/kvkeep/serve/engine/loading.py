"""Load a local Hugging Face causal language model, or raise an error with the reason in one line.

Uses no network, and runs no code that comes with a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn

from kvkeep.core.errors import InvalidValue, UnsupportedModel, did_you_mean, require
from kvkeep.core.geometry import KVGeometry, download_hint

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "PackedLinear", "context_tokens", "end_tokens", "load_config", "load_model", "pack",
    "pick_device", "pick_dtype", "vocabulary",
]  # fmt: skip

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Rotary embeddings that change at all positions once a sequence outgrows a length: keys cached
# below that length are wrong above it, so sequences stay below.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def load_config(path: str | os.PathLike[str]) -> PretrainedConfig:
    """Read and check the configuration of the model directory ``path``.

    Raises `InvalidValue` for a path that is no model directory and `UnsupportedModel` for a model
    that is not causal, or keeps something of no known kind. Weights are not read: whether the model
    computes right over pages, `prove` shows later.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "it is not a directory" if folder.exists() else "no such directory"
        raise InvalidValue(f"no model at {folder}: {what}{download_hint(folder)}")
    if not (folder / "config.json").is_file():
        raise InvalidValue(f"no model at {folder}: the directory has no config.json")
    transformers = require("transformers", "transformers")
    try:
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"cannot read {folder}/config.json: {_first_line(error)}") from error
    _check_causal(config, folder)
    _check_attention(config, folder)
    return config


def load_model(
    path: str | os.PathLike[str], config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the weights in ``path``, for a ``config`` from `load_config`, ready for inference."""
    transformers = require("transformers", "transformers")
    safetensors = require("safetensors", "transformers")
    try:
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            Path(path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise UnsupportedModel(
            f"cannot load the weights in {Path(path)}: {_first_line(error)}"
        ) from error
    model.to(device)  # type: ignore[arg-type]  # its stub knows no torch.device
    model.train(mode=False)
    return model


def pick_device(device: str | torch.device) -> torch.device:
    """Return the torch device named ``device``; "auto" is the GPU if there is one.

    A GPU that is named without a number is the current one, and the answer has its number, which
    `torch.cuda.set_device` asks for.

    Raises `InvalidValue` for a device that this machine, or this build of PyTorch, does not have.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidValue(f"no torch device is named {device!r}; try auto, cpu or cuda") from error
    try:
        return torch.empty(0, device=found).device
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        raise InvalidValue(f"{_missing(found)}; give auto or cpu") from error


def _missing(device: torch.device) -> str:
    """Return why no tensor can be made on ``device``."""
    if device.type != "cuda":
        return f"there is no device {str(device)!r} here"
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"device {str(device)!r} needs a PyTorch with CUDA, and {torch.__version__} is without"
        )
    if not torch.cuda.is_available():
        return f"device {str(device)!r} needs a GPU that CUDA can use, and there is none here"
    count = torch.cuda.device_count()
    return f"there is no device {str(device)!r}: there are {count} GPUs, from cuda:0"


def pick_dtype(dtype: str | torch.dtype | None, saved: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute and store KV in.

    None is the dtype of the ``saved`` model, but float32 on a CPU: half precision is slow there.
    """
    if dtype is None:
        dtype = "float32" if device.type == "cpu" else saved
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidValue(
            f"dtype is one of {', '.join(_DTYPES)}, got {name}{did_you_mean(name, _DTYPES)}"
        )
    return _DTYPES[name]


def context_tokens(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that ``config`` can be run on, in tokens; None for any length."""
    text = config.get_text_config()
    longest: int | None = getattr(text, "max_position_embeddings", None)
    for rope in _rope_parameters(text):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            longest = min(filter(None, (longest, original)), default=None)
    return longest


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids of ``model``: 0 … vocabulary - 1."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a text, as the model's generation settings name them."""
    ids: int | list[int] | None = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters: one set, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _check_causal(config: PretrainedConfig, folder: Path) -> None:
    transformers = require("transformers", "transformers")
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = ", ".join(config.architectures or [config.model_type])
    if (
        model_class is None
        or config.is_encoder_decoder
        or (config.architectures and model_class.__name__ not in config.architectures)
    ):
        raise UnsupportedModel(f"{folder} holds {named}, which is not a causal language model")


def _check_attention(config: PretrainedConfig, folder: Path) -> None:
    KVGeometry.from_config(config, dtype="float32")  # raises if it keeps something unknown
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        raise UnsupportedModel(f"{folder} attends in both directions: its KV cannot be reused")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


MOST_BYTES: Final = 1 << 30
"""Bytes that a model's packed weights may take; larger models are not packed."""

_FEWEST, _MOST = 3, 64  # rows


class PackedLinear(nn.Linear):
    """`torch.nn.Linear` with a second copy of its weights in oneDNN's order; for inference only.

    Decoding many sequences, or verifying drafts, multiplies weights with 3 to 64 rows: more than
    one, which costs no more than reading the weights, and too few for a plain matrix product to be
    efficient. oneDNN has kernels for this range that need the weights in their own order. Measured
    on one core, float32, 2048 × 768, ms a call, plain and packed:

        rows        1     2     4     9    16    32   128   512
        plain    0.22  0.23  0.44  0.66  0.59  0.80  2.40  21.8
        packed   0.26  0.27  0.27  0.34  0.44  0.70  2.53  25.5

    The operators are those that torch.compile substitutes for linear layers on a CPU.
    """

    packed: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Turn ``linear`` itself into a `PackedLinear`, so that references to it stay valid."""
        assert type(linear) is nn.Linear, "a subclass has a forward of its own"
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.packed = packed
        return linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[…, features in] to […, features out]."""
        if not _FEWEST <= rows.numel() // rows.shape[-1] <= _MOST:
            return super().forward(rows)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias, "none", [], ""
        )
        return out


def pack(model: nn.Module) -> int:
    """Pack the linear layers of ``model`` where that pays; return the bytes this took.

    It pays on a CPU in float32; models that would take more than `MOST_BYTES` are left as they are.
    Layers that share their weights (tied embeddings) are packed too; the weights stay shared.
    """
    layers = list(_packable(model))
    taken = sum(layer.weight.nbytes for layer in layers)
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if taken > MOST_BYTES or not available:
        return 0
    with torch.inference_mode():
        for layer in layers:
            PackedLinear.of(layer)
    return taken


def _packable(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                yield module
