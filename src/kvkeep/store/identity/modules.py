"""`model_identity`: the ``revision`` under which KV of a model is stored.

A loaded module is described as lines of text: its tree of modules and their state.

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
replace some of theirs (`patches_in`), and `settings` of the process. Modules outside of the tree
that hooks or functions call are described where they are met. values.py names what is left out.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules import module as torch_module

from kvkeep.core.errors import InvalidValue, told
from kvkeep.store.identity.files import files_identity
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

    ModelLike = nn.Module | str | os.PathLike[str]

__all__ = [
    "attention_of",
    "attributes_of",
    "hook_tables",
    "hooks_of",
    "is_loaded",
    "join",
    "lines_of",
    "model_identity",
    "patchable",
    "patches_in",
    "placed_modules",
    "settings",
    "tables_of",
    "tensors_of",
]  # fmt: skip

_MAGIC: Final = b"kvkeep model 1\n"
_DIGITS: Final = 40
_FORM: Final = re.compile(rf"loaded-[0-9a-f]{{{_DIGITS}}}")
# Where Transformers looks up the function of an attention implementation, and of its masks.
_REGISTERS: Final = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)
_VERSIONED: Final = ("transformers", "peft")
_MODEL_CODE: Final = ("transformers.models.", "peft.tuners.")


def model_identity(source: ModelLike, *, full: bool = False) -> str:
    """Return the identity of the KV that ``source`` computes: the ``revision`` of a namespace.

    Of a ``torch.nn.Module``: everything that was really loaded. That is every byte of its
    parameters and buffers, its classes, their attributes, hooks and adapters, its resolved
    configuration, and the version of Transformers (docs/keys.md explains them). Call it before the
    module is changed for speed. The text is ``loaded-`` and 40 hexadecimal digits, equal in every
    process and on every device.

    Of a path: the files there. That is the weights (`kvkeep.store.weights_digest`; ``full`` reads
    every byte, not samples), configuration files, code, and adapters beside them. The text is
    ``files-`` and 40 hexadecimal digits. It cannot describe a module that was loaded before the
    files changed, or with arguments that the files do not hold, so prefer the module. The two forms
    are never equal.

    Cost of a module: about 0.15 s a GiB and thread on a CPU, at most 8 threads; on a GPU the
    bandwidth to the host, in pieces of 16 MiB; and about 10 µs a submodule. Of a path: as
    `kvkeep.store.weights_digest`. Thread safety: any; the module must not change during the call.

    Raises:
        InvalidValue: the bytes of a tensor are not in memory, or the files do not identify the
            weights.
    """
    if isinstance(source, torch.nn.Module):
        digest = hashlib.sha256(_MAGIC)
        for line in lines_of(source):
            digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return f"loaded-{digest.hexdigest()[:_DIGITS]}"
    if isinstance(source, str | os.PathLike):
        return f"files-{files_identity(Path(source), full=full)[:_DIGITS]}"
    raise InvalidValue(
        f"a model is a torch.nn.Module or a path, got {type(source).__name__}: {told(source)}"
    )


def is_loaded(revision: object) -> bool:
    """Return whether ``revision`` has the form of the identity of a loaded module."""
    return isinstance(revision, str) and _FORM.fullmatch(revision) is not None


def placed_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``root`` and the modules below it with their paths, parents first, in order.

    A module may have several paths. Modules in a plain list, tuple or dictionary are yielded once.
    """
    seen = {id(module) for module in root.modules()}
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", root, frozenset())]
    while stack:
        path, module, above = stack.pop()
        yield path, module
        below = above | {id(module)}
        children = [
            (name, child)
            for name, child in tables_of(module)[2].items()
            if child is not None and id(child) not in below  # a module may contain itself
        ]
        for name, child in _hidden(module):
            if id(child) not in seen:
                seen.add(id(child))
                children.append((name, child))
        stack += [(join(path, name), child, below) for name, child in reversed(children)]


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
    digests.read(
        (join(path, name), value)
        for path, module in nodes
        for name, value in tensors_of(module).items()
    )
    inside = above | {id(module) for _, module in nodes}

    def describe(other: nn.Module) -> str:  # outside of the tree, called by a hook or a function
        lines = "\n".join(_tree_of(other, inside, digests))
        return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()

    writer = ValueWriter(digests, inside, describe)
    configs: dict[int, int] = {}  # configuration objects, numbered as they are met
    kinds: dict[type, str] = {}
    for path, module in nodes:
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = f"{writer.write(kind)} {writer.write(kind.forward)}"
        yield f"module {path!r} {kinds[kind]}"
        for name, value in sorted(attributes_of(module).items()):
            yield f"  {name}={writer.write(value)}"
        for name, value in tensors_of(module).items():
            beside = {each: held for each, held in vars(value).items() if each not in NEUTRAL}
            yield f"  tensor {name!r} {digests.of(join(path, name), value)} {writer.write(beside)}"
        for name, value in sorted(_packed_of(module).items()):
            yield f"  saved {name!r} {writer.write(value)}"
        for hook in hooks_of(module).values():
            yield f"  hook {writer.write(hook)}"
        config = getattr(module, "config", None)
        if is_config(config):
            first = id(config) not in configs
            yield f"  config {configs.setdefault(id(config), len(configs))}"
            if first:
                yield from _config_lines(config, writer)
    for hook in hooks_of(None).values():
        yield f"hook of every module {writer.write(hook)}"
    patches = [patch for place in patchable(kinds) for patch in patches_in(*place).items()]
    for name, value in sorted(dict(patches).items()):
        yield f"patch {name} {writer.write(value)}"
    packages = {package_of(base) for kind in kinds for base in kind.__mro__}
    for package in _VERSIONED:
        if package in packages:
            yield f"{package} {_version_of(package)}"


def _config_lines(config: Any, writer: ValueWriter) -> Iterator[str]:
    yield f"    class {writer.write(type(config))}"
    for name, value in sorted(config_of(config).items()):
        yield f"    {name}={writer.write(value)}"
    yield f"    attention {writer.write([*attention_of(config).values()])}"


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return torch's tables of a module's parameters, buffers and children, read without hooks."""
    return module._parameters, module._buffers, module._modules


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and buffers, by name."""
    recomputed = _recomputed(module)
    parameters, buffers, _ = tables_of(module)
    return {
        name: value
        for name, value in (parameters | buffers).items()
        if value is not None and name not in recomputed
    }


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's own attributes that may decide a number."""
    recomputed = _recomputed(module)
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in NEUTRAL and name not in recomputed
    }


def _packed_of(module: nn.Module) -> dict[str, Any]:
    """Return what the module saves besides parameters and buffers: packed quantised weights."""
    kind, base = type(module), torch.nn.Module
    if (
        kind._save_to_state_dict is base._save_to_state_dict
        and kind.get_extra_state is base.get_extra_state
    ):
        return {}
    saved: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", keep_vars=True)
    parameters, buffers, _ = tables_of(module)
    return {name: saved[name] for name in saved.keys() - parameters.keys() - buffers.keys()}


def hook_tables(module: nn.Module | None) -> list[dict[int, Any]]:
    """Return torch's tables of the hooks of ``forward``, before and after; None: of all modules."""
    if module is None:
        return [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    return [module._forward_pre_hooks, module._forward_hooks]


def hooks_of(module: nn.Module | None) -> dict[int, Any]:
    """Return the hooks in `hook_tables` that do not come from a library, numbered."""
    every = [hook for table in hook_tables(module) for hook in table.values()]
    return dict(enumerate(hook for hook in every if not is_library(hook)))


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


def attention_of(config: Any) -> dict[str, Any]:
    """Return the functions that Transformers registered under the names in a configuration."""
    key = getattr(config, "_attn_implementation", None)
    registers = {name: getattr(sys.modules.get(place), name, None) for place, name in _REGISTERS}
    return {
        name: register.get(key) if isinstance(key, str) else None
        for name, register in registers.items()
        if register is not None
    }


def patchable(kinds: Iterable[type]) -> list[tuple[str, Any]]:
    """Return the places, by name, where code may replace functions that ``kinds`` use.

    Those are their classes of libraries, the modules of Transformers and PEFT that define them, and
    ``torch.nn.functional``.
    """
    bases = {base for kind in kinds for base in kind.__mro__ if package_of(base) in LIBRARIES}
    names = {base.__module__ for base in bases if base.__module__.startswith(_MODEL_CODE)}
    return [
        *((f"{base.__module__}.{base.__qualname__}", base) for base in bases),
        *((name, sys.modules[name]) for name in names if name in sys.modules),
        ("torch.nn.functional", torch.nn.functional),
    ]


def patches_in(name: str, place: Any) -> dict[str, Any]:
    """Return the functions from elsewhere in one of the places of `patchable`, by name.

    Such as ``LlamaMLP.forward = mine`` or ``modeling_llama.apply_rotary_pos_emb = mine``.
    """
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


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # used from its sources
        return ""


def join(path: str, name: str) -> str:
    """Return the path of a member of the module at ``path``."""
    return f"{path}.{name}" if path else name
