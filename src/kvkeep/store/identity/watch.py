"""`ModelWatch`: notices that a loaded model changed since its identity was taken.

A snapshot holds what `kvkeep.store.identity.modules` describes: the dictionaries of modules,
configurations, objects and containers, with copies of their plain values; other values are compared
by identity. Tensors are compared by memory, strides and version, and by `SAMPLES` bytes of each, in
one operation a device.
"""

from __future__ import annotations

import copy
import operator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from kvkeep.store.identity.modules import (
    ModuleTables,
    attention_of,
    attributes_of,
    global_hooks,
    hooks_of,
    patchable,
    patches_in,
    placed_modules,
    settings,
    tensors_of,
)
from kvkeep.store.identity.values import config_of, is_config, is_plain, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["SAMPLES", "ModelWatch"]

SAMPLES: Final = 16
"""Bytes of each tensor that are compared, spread over all of it."""

_MISSING: Final = object()
_MOST_PARTS: Final = 1000  # of an attribute or a hook; further parts are not followed


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
        self._reached: dict[int, object] = {}  # alive, so that no other object takes their ids
        self._kinds: list[tuple[str, nn.Module, type]] = []
        self._states: list[_State] = []  # with a container that `_unchanged` compares
        self._computed: list[_State] = []
        self._tensors: list[_Tensor] = []
        self._add_modules("", root)
        for hook in global_hooks():
            self._follow("a hook of every module", hook)
        self._compute("the setting of {name!r} was changed", settings)
        self._compute("the global forward hooks of torch were changed", _numbered(global_hooks))
        self._add_code({kind for _, _, kind in self._kinds})
        self._live = [state.live for state in self._states]
        self._note()
        self._samples = _samples(self._tensors)

    def changed(self, *, samples: bool = True) -> str | None:
        """Return what changed since the snapshot, in words, or None.

        Without ``samples``, no byte of a tensor is read, and no device is waited for. Cost: 3 to 10
        µs a tensor with the modules around it; with samples 1 to 3 µs a tensor more on a CPU, and
        one wait for a GPU (`benchmarks/identity.py`).
        """
        for where, module, kind in self._kinds:
            if type(module) is not kind:
                return f"the class of {where} was replaced"
        for tensor in self._tensors:
            if tensor.differs():
                return f"the tensor {tensor.name!r} was written to, or its memory replaced"
        for state in self._computed if self._unchanged() else self._computed + self._states:
            if (what := state.changed()) is not None:
                return what
        if not self._unchanged():
            self._note()
        if samples and not all(sample.equal() for sample in self._samples):
            return "some bytes of the weights were changed"
        return None

    def _unchanged(self) -> bool:
        """Return whether surely nothing changed; objects are compared by identity first."""
        try:
            return all(map(operator.eq, self._live, self._seen))
        except (RuntimeError, TypeError, ValueError):  # a tensor was replaced: "==" has no truth
            return False

    def _note(self) -> None:
        """Remember all members, also those that decide nothing, so that `_unchanged` is quick."""
        self._seen = [
            [*map(_copy, live)] if isinstance(live, list) else _copied(live) for live in self._live
        ]

    # --- the snapshot ------------------------------------------------------------------------

    def _add_modules(self, above: str, root: nn.Module) -> None:
        """Add ``root`` and all modules below it, then what their attributes and hooks hold."""
        followed: list[tuple[str, object]] = []
        for path, module in placed_modules(root):
            if id(module) in self._reached:
                continue
            self._reached[id(module)] = module
            name = f"{above} › {path}" if above else path
            where = f"the module {name!r}" if name else "the model"
            self._kinds.append((where, module, type(module)))
            attributes = partial(attributes_of, module)
            self._add(f"the attribute {{name!r}} of {where} was changed", vars(module), attributes)
            tables = ModuleTables.of(module)
            for held in (tables.parameters, tables.buffers):
                members = partial(_tensors_by_name, module)
                self._add(f"a parameter or buffer of {where} was replaced", held, members)
            self._add(f"a child module of {where} was replaced", tables.children)
            for hooks in (tables.pre_hooks, tables.hooks):
                self._add(f"{where} has other hooks", hooks, _numbered(partial(hooks_of, module)))
            for own, tensor in tensors_of(module):
                self._follow(f"{name}.{own}".lstrip("."), tensor)
            followed += [(f"{name}.{own}".lstrip("."), each) for own, each in attributes().items()]
            followed += [(name, each) for each in hooks_of(module)]
            followed.append((f"{name}.config".lstrip("."), getattr(module, "config", None)))
        for name, value in followed:
            self._follow(name, value)

    def _follow(self, name: str, value: object) -> None:
        """Add a value that a module holds, and its parts."""
        waiting, count = [value], 0
        while waiting and count < _MOST_PARTS:
            part = waiting.pop()
            if is_plain(part) or id(part) in self._reached:
                continue
            count += 1
            if isinstance(part, nn.Module):
                self._add_modules(name, part)
                continue
            self._reached[id(part)] = part
            parts = parts_of(part)
            changed = f"{name!r} holds something that was changed"
            if isinstance(part, torch.Tensor):
                self._tensors.append(_Tensor.of(name, part))
            elif is_config(part):
                self._add("config.{name} was changed", vars(part), partial(config_of, part))
                self._compute(
                    "another function is registered for the attention implementation",
                    _numbered(partial(attention_of, part)),
                )
                waiting += config_of(part).values()
            elif isinstance(part, dict | list):
                self._add(changed, part)
            elif parts is not None and hasattr(part, "__dict__") and not callable(part):
                self._add(changed, vars(part))
            elif parts is not None and not isinstance(part, tuple):
                self._compute(changed, _numbered(partial(_parts, part)))
            waiting += reversed(parts or ())

    def _add_code(self, kinds: set[type[nn.Module]]) -> None:
        """Add the methods of classes, and functions of libraries that other code replaces."""
        replaced = "the code of {name} was replaced"
        for base in {base for kind in kinds for base in kind.__mro__}:
            if not base.__module__.startswith("torch."):
                self._add(replaced, vars(base), partial(_methods, base))
        for name, place in patchable(kinds):
            self._add(replaced, vars(place), partial(patches_in, name, place))

    def _add(
        self, what: str, live: Any, members: Callable[[], Mapping[Any, Any]] | None = None
    ) -> None:
        if members is None:
            members = partial(_members, live)
        self._states.append(_State(what, members, live))

    def _compute(self, what: str, members: Callable[[], Mapping[Any, Any]]) -> None:
        self._computed.append(_State(what, members))


class _State:
    """Members of a module, a configuration, an object or a container, as they were.

    ``live`` is the dictionary or list that holds them, among others that decide no number.
    """

    __slots__ = ("_kept", "_members", "_what", "live")

    def __init__(
        self, what: str, members: Callable[[], Mapping[Any, Any]], live: Any = None
    ) -> None:
        self._what = what
        self._members = members
        self._kept = _copied(members())
        self.live = live

    def changed(self) -> str | None:
        """Return what changed, in words; None if only what decides nothing did."""
        now = self._members()
        for name in [*now, *(name for name in self._kept if name not in now)]:
            if not _same(self._kept.get(name, _MISSING), now.get(name, _MISSING)):
                return self._what.format(name=name)
        return None


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


def _numbered(values: Callable[[], list[Any]]) -> Callable[[], dict[int, Any]]:
    """Return ``values`` as a call that returns them by their places."""
    return lambda: dict(enumerate(values()))


def _parts(value: object) -> list[Any]:
    return parts_of(value) or []


def _methods(kind: type) -> dict[str, Any]:
    members = vars(kind).items()
    return {f"{kind.__qualname__}.{name}": value for name, value in members if callable(value)}


def _tensors_by_name(module: nn.Module) -> dict[str, Any]:
    return dict(tensors_of(module))


def _members(container: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    return container if isinstance(container, dict) else dict(enumerate(container))


def _copied(members: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: _copy(value) for name, value in members.items()}


def _copy(value: Any) -> Any:
    """Return a copy of what can be changed in place; other objects are compared by identity."""
    return copy.deepcopy(value) if is_plain(value) else value


def _same(kept: object, now: object) -> bool:
    if kept is now:
        return True
    return type(kept) is type(now) and is_plain(kept) and is_plain(now) and bool(kept == now)


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr() if _has_memory(tensor) else 0


def _stride(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _has_memory(tensor: Tensor) -> bool:
    """Return whether the tensor has memory of its own: it is strided and wraps no others."""
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
