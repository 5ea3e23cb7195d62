"""Describe what a loaded module computes, as lines of text: its tree of modules and their state.

For each module, in the order in which its parent holds it:

    path, class     for classes outside of the known libraries, also their byte code; the function
                    called as ``forward``, if it is not that of the class
    attributes      numbers, texts and containers of them (norm epsilon, scaling, window, state of
                    adapters), and tensors that are no buffers
    tensors         parameters and buffers, saved or not: name, dtype, shape, every byte, and
                    attributes of the tensor (the state of a quantisation)
    saved           what the module saves besides: packed weights of a quantised layer
    hooks           code of the hooks of ``forward``, except those with which Transformers
                    collects outputs
    configuration   every attribute, defaults included, of each configuration object once
    attention       the functions registered for the attention implementation

And once: the versions of Transformers and PEFT if the tree has classes of theirs, functions that
replace some of theirs (`patches_of`), and `settings` of the process. Modules outside of the tree
that hooks or functions call are described where they are met. values.py names what is left out.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from kvkeep.store.identity.values import (
    LIBRARIES,
    NEUTRAL,
    TensorDigests,
    ValueWriter,
    config_of,
    is_config,
    is_library,
    package_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

__all__ = [
    "ModuleTables",
    "PlacedModule",
    "attention_of",
    "attributes_of",
    "global_hooks",
    "hooks_of",
    "lines_of",
    "packed_of",
    "patchable",
    "patches_in",
    "patches_of",
    "placed_modules",
    "settings",
    "tensors_of",
]  # fmt: skip

# Where Transformers looks up the function of an attention implementation, and of its masks.
_REGISTERS: Final = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)
_VERSIONED: Final = ("transformers", "peft")
_MODEL_CODE: Final = ("transformers.models.", "peft.tuners.")


class PlacedModule(NamedTuple):
    """A module and its path in the tree; one module may have several places."""

    path: str
    module: nn.Module


def placed_modules(root: nn.Module) -> Iterator[PlacedModule]:
    """Yield ``root`` and the modules below it with their paths, parents first, in order.

    Modules in a plain list, tuple or dictionary are yielded once.
    """
    seen = {id(module) for module in root.modules()}
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", root, frozenset())]
    while stack:
        path, module, above = stack.pop()
        yield PlacedModule(path, module)
        below = above | {id(module)}
        children = [
            (name, child)
            for name, child in ModuleTables.of(module).children.items()
            if child is not None and id(child) not in below  # a module may contain itself
        ]
        for name, child in _hidden(module):
            if id(child) not in seen:
                seen.add(id(child))
                children.append((name, child))
        stack += [(_join(path, name), child, below) for name, child in reversed(children)]


def _hidden(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules in plain containers, in which PyTorch does not register them."""
    for name, value in module.__dict__.items():
        if name not in NEUTRAL and isinstance(value, list | tuple | dict):
            held = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in held:
                if isinstance(each, torch.nn.Module):
                    yield f"{name}[{key}]", each


def lines_of(root: nn.Module) -> Iterator[str]:
    """Yield everything that is part of the identity of ``root``, line by line."""
    yield f"settings {settings()!r}"
    yield from _tree_of(root, set(), TensorDigests())


def _tree_of(root: nn.Module, above: set[int], digests: TensorDigests) -> Iterator[str]:
    """Yield the lines of a tree; modules with ids in ``above`` are described elsewhere."""
    root = getattr(root, "_orig_mod", root)  # what torch.compile wraps
    nodes = list(placed_modules(root))
    tensors = [(node, name, value) for node in nodes for name, value in tensors_of(node.module)]
    digests.read([(_join(node.path, name), value) for node, name, value in tensors])
    inside = above | {id(node.module) for node in nodes}
    writer = ValueWriter(digests, inside, lambda module: _digest_of(module, inside, digests))
    packages: set[str] = set()
    configs: dict[int, int] = {}  # configuration objects, numbered as they are met
    kinds: dict[type, str] = {}
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
        for name, value in sorted(packed_of(module).items()):
            yield f"  saved {name!r} {writer.write(value)}"
        for hook in hooks_of(module):
            yield f"  hook {writer.write(hook)}"
        config = getattr(module, "config", None)
        if is_config(config):
            first = id(config) not in configs
            yield f"  config {configs.setdefault(id(config), len(configs))}"
            if first:
                yield from _config_lines(config, writer)
    for hook in global_hooks():
        yield f"hook of every module {writer.write(hook)}"
    for name, value in patches_of(kinds):
        yield f"patch {name} {writer.write(value)}"
    for package in _VERSIONED:
        if package in packages:
            yield f"{package} {_version_of(package)}"


def _config_lines(config: Any, writer: ValueWriter) -> Iterator[str]:
    yield f"    class {writer.write(type(config))}"
    for name, value in sorted(config_of(config).items()):
        yield f"    {name}={writer.write(value)}"
    yield f"    attention {writer.write(attention_of(config))}"


def _digest_of(root: nn.Module, above: set[int], digests: TensorDigests) -> str:
    """Return a digest of a module outside of the tree, which a hook or a function calls."""
    lines = "\n".join(_tree_of(root, above, digests))
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


class ModuleTables(NamedTuple):
    """The dictionaries in which torch keeps what a module has."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    children: dict[str, Any]
    pre_hooks: dict[int, Any]
    hooks: dict[int, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleTables:
        """Return those of a module, read without its hooks."""
        return cls(
            module._parameters,
            module._buffers,
            module._modules,
            module._forward_pre_hooks,
            module._forward_hooks,
        )


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's own parameters and buffers, by name."""
    recomputed = _recomputed(module)
    return [
        (name, value)
        for held in ModuleTables.of(module)[:2]
        for name, value in held.items()
        if value is not None and name not in recomputed
    ]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's own attributes that may decide a number."""
    recomputed = _recomputed(module)
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in NEUTRAL and name not in recomputed
    }


def packed_of(module: nn.Module) -> dict[str, Any]:
    """Return what the module saves besides parameters and buffers: packed quantised weights."""
    kind = type(module)
    base = torch.nn.Module
    if (
        kind._save_to_state_dict is base._save_to_state_dict
        and kind.get_extra_state is base.get_extra_state
    ):
        return {}
    saved: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", keep_vars=True)
    parameters, buffers, *_ = ModuleTables.of(module)
    held = parameters.keys() | buffers.keys()
    return {name: value for name, value in saved.items() if name not in held}


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of the module's ``forward`` that do not come from a library."""
    tables = ModuleTables.of(module)
    every = (*tables.pre_hooks.values(), *tables.hooks.values())
    return [hook for hook in every if not is_library(hook)]


def settings() -> dict[str, object]:
    """Return settings of process and thread (as autocast) that change numbers. Cost: 3 µs."""
    cuda: Any = torch.backends.cuda
    cpu: Any = torch.backends.mkldnn
    return {
        # By backend: where they differ, torch.get_float32_matmul_precision raises.
        "float32 precision": tuple(
            "ieee" if each.matmul.fp32_precision == "none" else each.matmul.fp32_precision
            for each in (cuda, cpu)
        ),
        "reduced precision": (
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_accumulation,
        ),
        "attention kernels": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "autocast": tuple(
            str(torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ),
    }  # fmt: skip


def attention_of(config: Any) -> list[Any]:
    """Return the functions that Transformers registered under the names in a configuration."""
    registered = []
    for module, name in _REGISTERS:
        register = getattr(sys.modules.get(module), name, None)
        if register is not None:
            key = getattr(config, "_attn_implementation", None)
            registered.append(register.get(key) if isinstance(key, str) else None)
    return registered


def patchable(kinds: Iterable[type]) -> list[tuple[str, Any]]:
    """Return the classes of libraries and the modules of code that `patches_of` checks, by name."""
    bases = {base for kind in kinds for base in kind.__mro__ if package_of(base) in LIBRARIES}
    names = {base.__module__ for base in bases if base.__module__.startswith(_MODEL_CODE)}
    places: list[tuple[str, Any]] = [(_full_name(base), base) for base in bases]
    places += [(name, sys.modules[name]) for name in names if name in sys.modules]
    return [*places, ("torch.nn.functional", torch.nn.functional)]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def patches_of(kinds: Iterable[type]) -> list[tuple[str, Any]]:
    """Return functions from elsewhere that replace those of a library, by name.

    Such as ``LlamaMLP.forward = mine`` or ``modeling_llama.apply_rotary_pos_emb = mine``. Checked
    are the modules of Transformers and PEFT in which ``kinds`` are defined, and
    ``torch.nn.functional``.
    """
    patches = (patches_in(name, place).items() for name, place in patchable(kinds))
    return sorted(itertools.chain.from_iterable(patches), key=lambda patch: patch[0])


def patches_in(name: str, place: Any) -> dict[str, Any]:
    """Return the functions from elsewhere in one of the places of `patchable`."""
    return {
        f"{name}.{own}": value
        for own, value in vars(place).items()
        if isinstance(value, types.FunctionType | functools.partial | types.MethodType)
        and not is_library(value)
        and package_of(value) not in sys.stdlib_module_names
    }


def _recomputed(module: nn.Module) -> frozenset[str]:
    """Return names of tensors and attributes that ``module`` recomputes by the text's length.

    A table in use (``inv_freq``) counts only while it may be the table of a long text: a table that
    was edited in its first state stays in use.
    """
    kinds = module.__dict__.get("rope_type", "")
    every = kinds.items() if isinstance(kinds, dict) else [("", kinds)]
    found: set[str] = set()
    for layers, kind in every:
        prefix = f"{layers}_" if layers else ""
        table = f"{prefix}inv_freq"
        if "longrope" in str(kind):  # written at each call
            found |= {table, f"{prefix}long_inv_freq"}
        elif "dynamic" in str(kind):
            found |= {f"{prefix}max_seq_len_cached", "max_seq_len_cached"}
            used = getattr(module, table, None)
            first = getattr(module, f"{prefix}original_inv_freq", None)
            held: dict[str, Any] = module.__dict__
            longest = held.get(f"{prefix}max_seq_len_cached", held["max_seq_len_cached"])
            if longest > held["original_max_seq_len"] or _equal(used, first):
                found.add(table)
    return frozenset(found)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two tensors, on any devices, hold the same numbers."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one is other or torch.equal(one.detach().cpu(), other.detach().cpu())


def global_hooks() -> list[Any]:
    """Return the hooks that PyTorch calls for every module, as `hooks_of`."""
    every = (
        *torch_module._global_forward_pre_hooks.values(),
        *torch_module._global_forward_hooks.values(),
    )
    return [hook for hook in every if not is_library(hook)]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # used from its sources
        return ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
