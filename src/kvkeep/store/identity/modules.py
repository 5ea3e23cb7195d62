"""Describe what a loaded module computes, as lines of text: its tree of modules and their state.

For each module, in the order in which its parent holds it:

    path, class     of classes outside of the known libraries the byte code, too; the function that
                    is called as ``forward``, if it is not the class's own
    attributes      numbers, texts and containers of them (norm epsilon, scaling, window, scaling
                    and state of adapters), tensors that are no buffers
    tensors         parameters and buffers, also those that are not saved, by name, dtype, shape
                    and every byte, and the attributes they carry (the state of a quantisation)
    hooks           those of ``forward``, by their code; not the ones that Transformers registers
                    itself to collect outputs
    configuration   every attribute, defaults included, of each configuration object once

and once: the versions of Transformers and PEFT where classes of theirs are part of the tree, and
the precision of float32 products. `NEUTRAL` and
`NEUTRAL_CONFIG` (values.py) name what is left out.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from kvkeep.store.identity.tensors import TensorDigests
from kvkeep.store.identity.values import LIBRARIES, ValueWriter, config_of, is_config, package_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

__all__ = [
    "PlacedModule", "attributes_of", "global_hooks", "hooks_of", "lines_of", "placed_modules",
    "settings", "tensors_of",
]  # fmt: skip

NEUTRAL: Final = frozenset(torch.nn.Module().__dict__) | {
    # names and notes
    "config", "name_or_path", "generation_config", "model_tags", "warnings_issued",
    # how it was loaded, saved and divided among devices
    "_is_hf_initialized", "_is_buffer", "persistent", "_use_kernels",
    "_weight_conversions", "all_tied_weights_keys", "hf_device_map",
    "_hf_hook", "_old_forward", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_no_split_modules",
    "_skip_keys_device_placement", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    # training, and outputs besides the logits
    "gradient_checkpointing", "loss_type", "_loss_function", "_output_capturing_hooks_installed",
    # compiled copies of the same operations, and the state of `generate` between calls
    "_compiled_call", "_compiled_call_impl", "_last_compile_config", "_previous_max_cache_length",
}  # fmt: skip
"""Attributes of modules that do not change KV, or that are described elsewhere."""

# Rotary embeddings that compute their table anew when the length of a text passes a limit. KV is
# kept on one side of it alone, where the table is the original one, which is described.
_RECOMPUTED_ROPE: Final = ("dynamic", "longrope")
_RECOMPUTED: Final = ("max_seq_len_cached", "long_inv_freq", "inv_freq")
_VERSIONED: Final = ("transformers", "peft")


class PlacedModule(NamedTuple):
    """A module and its path in the tree; a module at several places gives several of these."""

    path: str
    module: nn.Module


def placed_modules(root: nn.Module) -> Iterator[PlacedModule]:
    """Yield ``root`` and the modules below it, parents first, in order.

    Modules that are held in a plain list, tuple or dictionary are yielded once.
    """
    seen = {id(module) for module in root.modules()}
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", root, frozenset())]
    while stack:
        path, module, above = stack.pop()
        yield PlacedModule(path, module)
        below = above | {id(module)}
        children = [
            (name, child)
            for name, child in module._modules.items()
            if child is not None and id(child) not in below  # a module may contain itself
        ]
        for name, child in _hidden(module):
            if id(child) not in seen:
                seen.add(id(child))
                children.append((name, child))
        stack += [(_join(path, name), child, below) for name, child in reversed(children)]


def _hidden(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in plain containers, where they are not registered."""
    for name, value in module.__dict__.items():
        if name not in NEUTRAL and isinstance(value, list | tuple | dict):
            held = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in held:
                if isinstance(each, torch.nn.Module):
                    yield f"{name}[{key}]", each


def lines_of(root: nn.Module) -> Iterator[str]:
    """Yield everything that is part of the identity of ``root``, line by line."""
    root = getattr(root, "_orig_mod", root)  # what torch.compile wraps
    nodes = list(placed_modules(root))
    digests = TensorDigests()
    tensors = [(node, name, value) for node in nodes for name, value in tensors_of(node.module)]
    digests.read([(_join(node.path, name), value) for node, name, value in tensors])
    writer = ValueWriter(digests)
    packages: set[str] = set()
    configs: dict[int, int] = {}  # the number of each configuration object
    kinds: dict[type, str] = {}
    yield f"settings {settings()!r}"
    for node in nodes:
        module, path = node.module, node.path
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = f"{writer.write(kind)} {writer.write(kind.forward)}"
            packages.update(package_of(base) for base in kind.__mro__)
        yield f"module {path!r} {kinds[kind]}"
        for name, value in sorted(attributes_of(module).items()):
            yield f"  {name}={writer.write(value)}"
        for name, value in tensors_of(module):
            beside = {each: held for each, held in vars(value).items() if each not in NEUTRAL}
            yield f"  tensor {name!r} {digests.of(_join(path, name), value)} {writer.write(beside)}"
        for hook in hooks_of(module):
            yield f"  hook {writer.write(hook)}"
        config = getattr(module, "config", None)
        if is_config(config):
            first = id(config) not in configs
            yield f"  config {configs.setdefault(id(config), len(configs))}"
            if first:
                yield f"    class {writer.write(type(config))}"
                for name, value in sorted(config_of(config).items()):
                    yield f"    {name}={writer.write(value)}"
    for hook in global_hooks():
        yield f"hook of every module {writer.write(hook)}"
    for package in _VERSIONED:
        if package in packages:
            yield f"{package} {_version_of(package)}"


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Its own parameters and buffers."""
    recomputed = _recomputes(module)
    return [
        (name, value)
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
        if value is not None and not (recomputed and _is_recomputed(name))
    ]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Its own attributes that may decide a number."""
    recomputed = _recomputes(module)
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in NEUTRAL and not (recomputed and _is_recomputed(name))
    }


def hooks_of(module: nn.Module) -> list[Any]:
    """Hooks of its ``forward`` that do not come from a library."""
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in every if package_of(hook) not in LIBRARIES]


def settings() -> tuple[str, ...]:
    """Return the settings of the process that change numbers."""
    return (torch.get_float32_matmul_precision(),)


def _recomputes(module: nn.Module) -> bool:
    kinds = module.__dict__.get("rope_type", "")
    every = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(name in str(kind) for kind in every for name in _RECOMPUTED_ROPE)


def _is_recomputed(name: str) -> bool:
    return name.endswith(_RECOMPUTED) and not name.endswith("original_inv_freq")


def global_hooks() -> list[Any]:
    """Hooks of the ``forward`` of every module, as `hooks_of`."""
    every = (
        *torch_module._global_forward_pre_hooks.values(),
        *torch_module._global_forward_hooks.values(),
    )
    return [hook for hook in every if package_of(hook) not in LIBRARIES]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # used from its sources
        return ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
