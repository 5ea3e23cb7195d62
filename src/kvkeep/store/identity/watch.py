"""`ModelWatch`: notices that a loaded model changed since its identity was taken.

A snapshot holds what `kvkeep.store.identity.modules` describes. Where reading would cost too much,
objects are compared by identity: modules, parameters, buffers, hooks, and attributes that are not
plain. Plain attributes are compared by value; tensors by memory, strides and version, and by
`SAMPLES` bytes of each, in one operation a device.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kvkeep.store.identity.modules import (
    PlacedModule,
    attention_of,
    attributes_of,
    global_hooks,
    hooks_of,
    patchable,
    patches_of,
    placed_modules,
    settings,
    tensors_of,
)
from kvkeep.store.identity.values import config_of, is_config, is_plain, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

__all__ = ["SAMPLES", "ModelWatch"]

SAMPLES: Final = 16
"""Bytes of each tensor that are compared, spread over all of it."""

_MISSING: Final = object()
_MOST_PARTS: Final = 1000  # a value with more parts is compared by identity


class ModelWatch:
    """A snapshot of ``root`` that can be compared with the model as it is now.

    It notices: a replaced module, parameter, buffer, hook or class; a changed attribute,
    configuration or setting of the process; every change to a tensor that PyTorch counts; a tensor
    with other memory; a change through ``tensor.data`` that reaches one of the `SAMPLES` bytes; and
    changed parts of hooks, functions and objects that modules hold, such as closures, arguments,
    attributes, and tensors and modules among these.

    It misses: a change through ``tensor.data``, or in place by another library, that touches none
    of the samples, such as one row of an embedding; and code replaced in the globals of a module
    outside of Transformers and PEFT.

    The watch keeps the tensors alive: drop it together with the model. Thread safety: none.
    """

    def __init__(self, root: nn.Module) -> None:
        nodes = _with_called(list(placed_modules(root)))
        self._modules = [_Module(node.path, node.module) for node in _once(nodes)]
        found: dict[int, tuple[str, Tensor]] = {}
        for node in nodes:
            for name, value in tensors_of(node.module):
                found.setdefault(id(value), (f"{node.path}.{name}".lstrip("."), value))
            for name, value in _values_of(node.module):
                for part in _Parts(value).leaves:
                    if isinstance(part, torch.Tensor):
                        found.setdefault(id(part), (f"{node.path}.{name}".lstrip("."), part))
        self._tensors = [_Tensor.of(name, tensor) for name, tensor in found.values()]
        self._configs = _configs(node.module for node in nodes)
        self._attention = [(config, attention_of(config)) for config, _ in self._configs]
        self._settings = settings()
        self._hooks = global_hooks()
        self._code = _Code({type(node.module) for node in nodes})
        self._samples = _samples(self._tensors)

    def changed(self, *, samples: bool = True) -> str | None:
        """Return what changed since the snapshot, in words, or None.

        Without ``samples``, no byte of a tensor is read, and no device is waited for. Cost: 3 to 10
        µs a tensor with the modules around it; with samples 1 to 3 µs a tensor more on a CPU, and
        one wait for a GPU (`benchmarks/identity.py`).
        """
        for module in self._modules:
            if module.differs() and (what := module.what()) is not None:
                return what
        for tensor in self._tensors:
            if tensor.differs():
                return f"the tensor {tensor.name!r} was written to, or its memory replaced"
        if (what := self._changed_around()) is not None:
            return what
        if not _all_are(self._hooks, global_hooks()):
            return "the global forward hooks of torch were changed"
        if samples and not all(sample.equal() for sample in self._samples):
            return "some bytes of the weights were changed"
        return None

    def _changed_around(self) -> str | None:
        """Return what changed outside of modules: configurations, settings and code."""
        for config, kept in self._configs:
            if (name := _unlike(kept, config_of(config))) is not None:
                return f"config.{name} was changed"
        for config, functions in self._attention:
            if not _all_are(functions, attention_of(config)):
                return "another function is registered for the attention implementation"
        now = settings()
        if now != self._settings:
            name = next(name for name, value in now.items() if value != self._settings[name])
            return f"the setting of {name} was {self._settings[name]}, and is {now[name]}"
        if (replaced := self._code.changed()) is not None:
            return f"the code of {replaced} was replaced"
        return None


class _Module:
    """The state of one module, compared in two steps: `differs` is quick, `what` exact."""

    __slots__ = (
        "_attributes", "_children", "_containers", "_empty", "_held", "_hooks", "_kind", "_module",
        "_parts", "_path", "_seen", "_tensors",
    )  # fmt: skip

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path = path
        self._module = module
        self._kind = type(module)
        self._attributes = _kept(attributes_of(module))
        self._tensors = _ids(tensors_of(module))
        self._children = list(map(id, module._modules.values()))
        self._hooks = hooks_of(module)
        # A container that is changed in place stays the same object, so a copy is compared.
        self._containers = [
            (name, value)
            for name, value in self._attributes.items()
            if isinstance(value, dict | list | set)
        ]
        self._parts = [
            parts
            for _, value in _values_of(module)
            if not is_plain(value) and (parts := _Parts(value)).several
        ]
        self._note()

    def _note(self) -> None:
        """Remember all attributes, also neutral ones, so that `differs` is quick."""
        now = self._module.__dict__
        self._seen = dict(now)
        every = [now["_modules"], now["_parameters"], now["_buffers"]]
        self._held = [(held, list(map(id, held.values()))) for held in every if held]
        self._empty = [held for held in every if not held]

    def differs(self) -> bool:
        """Return whether anything may have changed. Cost: about 1 µs."""
        now = self._module.__dict__
        try:
            if now != self._seen:  # compares objects by identity first
                return True
        except (RuntimeError, ValueError):  # a tensor or array was replaced: "==" has no truth
            return True
        for held, ids in self._held:
            if list(map(id, held.values())) != ids:
                return True
        if any(self._empty):
            return True
        if now["_forward_hooks"] or now["_forward_pre_hooks"] or self._hooks:
            return True
        if type(self._module) is not self._kind:
            return True
        if self._parts and any(parts.differ() for parts in self._parts):
            return True
        return any(now[name] != kept for name, kept in self._containers)

    def what(self) -> str | None:
        """Return what changed, in words; None if only neutral attributes did."""
        where = f"the module {self._path!r}" if self._path else "the model"
        if type(self._module) is not self._kind:
            return f"the class of {where} was replaced"
        if (name := _unlike(self._attributes, attributes_of(self._module))) is not None:
            return f"the attribute {name!r} of {where} was changed"
        if _ids(tensors_of(self._module)) != self._tensors:
            return f"a parameter or buffer of {where} was replaced"
        modules = list(map(id, self._module._modules.values()))
        if modules != self._children:
            return f"a child module of {where} was replaced"
        if not _all_are(self._hooks, hooks_of(self._module)):
            return f"{where} has other hooks"
        if any(parts.differ() for parts in self._parts):
            return f"{where} holds something that was changed: a hook, a function or an object"
        self._note()
        return None


class _Parts:
    """The parts of a value, down to tensors, modules, numbers and texts."""

    __slots__ = ("_value", "leaves")

    def __init__(self, value: object) -> None:
        self._value = value
        self.leaves = _leaves_of(value)

    @property
    def several(self) -> bool:
        """Whether the value has more to compare than its own identity."""
        return len(self.leaves) != 1 or self.leaves[0] is not self._value

    def differ(self) -> bool:
        now = _leaves_of(self._value)
        return len(now) != len(self.leaves) or not all(
            one is other or _same(one, other) for one, other in zip(now, self.leaves, strict=True)
        )


class _Code:
    """The methods of classes, and the functions beside them, as they were; see `patches_of`."""

    def __init__(self, kinds: set[type[nn.Module]]) -> None:
        self._kinds = sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__))
        own = {base for kind in kinds for base in kind.__mro__}
        self._places: dict[int, Any] = {id(place): place for place in own}
        self._places |= {id(place): place for _, place in patchable(kinds)}
        self._patches = patches_of(kinds)
        self._forward = [kind.forward for kind in self._kinds]
        self._note()

    def _note(self) -> None:
        self._seen = [dict(vars(place)) for place in self._places.values()]

    def changed(self) -> str | None:
        """Return the name of a replaced function that decides a number, or None."""
        try:
            if all(map(_equal_names, self._places.values(), self._seen)):
                return None
        except (RuntimeError, ValueError):  # tensors and arrays among class attributes
            pass
        for kind, forward in zip(self._kinds, self._forward, strict=True):
            if kind.forward is not forward:
                return f"{kind.__qualname__}.forward"
        for place, seen in zip(self._places.values(), self._seen, strict=True):
            if isinstance(place, type) and not place.__module__.startswith("torch."):
                for name, value in vars(place).items():
                    if callable(value) and seen.get(name, value) is not value:
                        return f"{place.__qualname__}.{name}"
        before = dict(self._patches)
        now = dict(patches_of(self._kinds))
        for name in before.keys() | now.keys():
            if before.get(name) is not now.get(name):
                return name
        self._note()
        return None


def _equal_names(place: object, seen: dict[str, Any]) -> bool:
    return vars(place) == seen


class _Tensor(NamedTuple):
    """A tensor, with values that change when it is written to or moved."""

    name: str
    tensor: Tensor
    pointer: int
    version: int | None
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Tensor:
        version = None if tensor.is_inference() else tensor._version
        return cls(name, tensor, _pointer(tensor), version, _stride(tensor))

    def differs(self) -> bool:
        tensor = self.tensor
        return (
            (self.version is not None and tensor._version != self.version)
            or _pointer(tensor) != self.pointer
            or _stride(tensor) != self.stride
        )


class _Sample:
    """Some bytes of all tensors of one device."""

    def __init__(self, views: list[Tensor]) -> None:
        self._views = views
        self._kept = self._read()

    def equal(self) -> bool:
        return torch.equal(self._read(), self._kept)

    def _read(self) -> Tensor:
        with torch.inference_mode():
            return torch.cat(self._views)


def _values_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return attributes and hooks, by name."""
    return [*attributes_of(module).items(), *(("hook", hook) for hook in hooks_of(module))]


def _with_called(nodes: list[PlacedModule]) -> list[PlacedModule]:
    """Return ``nodes``, and modules outside of the tree that their hooks and attributes call."""
    known = {id(node.module) for node in nodes}
    waiting = [
        *((node.path, value) for node in nodes for _, value in _values_of(node.module)),
        *(("a hook of every module", hook) for hook in global_hooks()),
    ]
    found = list(nodes)
    while waiting:
        path, value = waiting.pop()
        for part in _leaves_of(value):
            if isinstance(part, torch.nn.Module) and id(part) not in known:
                below = [
                    PlacedModule(f"{path} › {node.path}", node.module)
                    for node in placed_modules(part)
                ]
                known |= {id(node.module) for node in below}
                found += below
                waiting += [(n.path, each) for n in below for _, each in _values_of(n.module)]
    return found


def _leaves_of(value: object) -> list[Any]:
    """Return the parts of ``value`` in order: those without parts, and the objects that have parts.

    Cost: about 1 µs a part.
    """
    leaves: list[Any] = []
    seen: set[int] = set()
    stack = [value]
    while stack:
        one = stack.pop()
        parts = None if id(one) in seen else parts_of(one)
        if parts is None or not isinstance(one, dict | list | tuple):
            leaves.append(one)
        if parts is not None:
            seen.add(id(one))
            stack += reversed(parts)
        if len(leaves) + len(stack) > _MOST_PARTS:
            return [value]
    return leaves


def _once(nodes: list[Any]) -> list[Any]:
    """Return each module once, however often it is in the tree."""
    return list({id(node.module): node for node in reversed(nodes)}.values())[::-1]


def _samples(tensors: list[_Tensor]) -> list[_Sample]:
    """Return views of a few bytes of each tensor, by device."""
    views: dict[torch.device, list[Tensor]] = {}
    with torch.inference_mode():
        for kept in tensors:
            tensor = kept.tensor
            if not _has_memory(tensor) or not tensor.numel():
                continue  # compared by identity only
            storage = tensor.untyped_storage()
            begin = tensor.storage_offset() * tensor.element_size()
            room = min(tensor.nbytes, storage.nbytes() - begin)
            count = min(SAMPLES, room)
            step = max(1, room // count)
            step -= step > 1 and step % 2 == 0  # odd, to sample different bytes of elements
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            view.set_(storage, begin, (count,), (step,))
            views.setdefault(tensor.device, []).append(view)
    return [_Sample(each) for each in views.values()]


def _configs(modules: Iterable[nn.Module]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the configurations of the modules, nested ones too, with their attributes."""
    found: dict[int, Any] = {}
    waiting: list[Any] = []
    for module in modules:
        waiting += [getattr(module, "config", None), *attributes_of(module).values()]
    while waiting:
        config = waiting.pop()
        if is_config(config) and id(config) not in found:
            found[id(config)] = config
            waiting += config_of(config).values()
    return [(config, _kept(config_of(config))) for config in found.values()]


def _kept(attributes: dict[str, Any] | Any) -> dict[str, Any]:
    """Return ``attributes`` with copies of the values that can be changed in place."""
    return {
        name: copy.deepcopy(value) if is_plain(value) else value
        for name, value in attributes.items()
    }


def _unlike(kept: dict[str, Any], now: Any) -> str | None:
    """Return the name of an attribute that differs, or that only one of the two has."""
    for name, value in now.items():
        known = kept.get(name, _MISSING)
        if known is not value and not _same(known, value):
            return str(name)
    return next((str(name) for name in kept if name not in now), None)


def _same(kept: object, now: object) -> bool:
    """Return whether both are plain and equal; other objects are compared by identity."""
    return type(kept) is type(now) and is_plain(kept) and is_plain(now) and bool(kept == now)


def _ids(tensors: list[tuple[str, Tensor]]) -> list[int]:
    return [id(tensor) for _, tensor in tensors]


def _all_are(kept: list[Any], now: list[Any]) -> bool:
    return len(kept) == len(now) and all(a is b for a, b in zip(kept, now, strict=True))


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr() if _has_memory(tensor) else 0


def _stride(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _has_memory(tensor: Tensor) -> bool:
    """Return whether the tensor has memory of its own: it is strided and wraps no others."""
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
