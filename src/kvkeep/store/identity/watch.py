"""`ModelWatch`: notices that a loaded model changed since its identity was taken.

The watch is one table of facts: a container (the attributes of a module, its parameters, a
configuration, a closure), and its members that decide numbers, as they were. Plain values are
compared, other objects are compared by identity and have facts of their own. Tensors are compared
by memory, strides and version, and by `SAMPLES` bytes of each, in one operation a device.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from kvkeep.store.identity.modules import (
    attention_of,
    attributes_of,
    hook_tables,
    hooks_of,
    join,
    patchable,
    patches_in,
    placed_modules,
    settings,
    tables_of,
    tensors_of,
)
from kvkeep.store.identity.values import (
    LIBRARIES,
    config_of,
    held_by,
    is_config,
    is_plain,
    package_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
        self._modules: dict[str, nn.Module] = {}  # by place
        self._tensors: list[tuple[str, Tensor]] = []
        self._facts: list[_Fact] = []  # of containers that `_live` holds
        self._live: list[Any] = []
        self._computed: list[_Fact] = []  # of all else: read at each look
        self._add_modules("", root)
        for hook in hooks_of(None).values():
            self._follow("a hook of every module", hook)
        self._add("the setting of {name!r} was changed", settings)
        self._add("the global forward hooks of torch were changed", partial(hooks_of, None))
        kinds = {type(module) for module in self._modules.values()}
        for base in {base for kind in kinds for base in kind.__mro__}:
            if not base.__module__.startswith("torch."):
                self._add("the code of {name} was replaced", partial(_methods, base), vars(base))
        for name, place in patchable(kinds):
            patches = partial(patches_in, name, place)
            self._add("the code of {name} was replaced", patches, vars(place))
        self._kinds = [*map(type, self._modules.values())]
        self._states = [_state(tensor) for _, tensor in self._tensors]
        self._samples = _samples(tensor for _, tensor in self._tensors)
        self._sampled = [_bytes_of(views) for views in self._samples]
        self._note()

    def changed(self, *, samples: bool = True) -> str | None:
        """Return what changed since the snapshot, in words, or None.

        Without ``samples``, no byte of a tensor is read, and no device is waited for. Cost: 3 to 10
        µs a tensor with the modules around it; with samples 1 to 3 µs a tensor more on a CPU, and
        one wait for a GPU (`benchmarks/identity.py`).
        """
        for (where, module), kind in zip(self._modules.items(), self._kinds, strict=True):
            if type(module) is not kind:
                return f"the class of {where} was replaced"
        for (name, tensor), state in zip(self._tensors, self._states, strict=True):
            if _state(tensor) != state:
                return f"the tensor {name!r} was written to, or its memory replaced"
        unchanged = self._unchanged()
        for fact in self._computed if unchanged else self._computed + self._facts:
            if (what := fact.changed()) is not None:
                return what
        if not unchanged:
            self._note()
        if samples and not all(
            torch.equal(_bytes_of(views), before)
            for views, before in zip(self._samples, self._sampled, strict=True)
        ):
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

    def _add(self, what: str, read: Callable[[], Mapping[Any, Any]], live: Any = None) -> None:
        """Add what ``read`` returns, members of ``live`` if that is given."""
        fact = _Fact(what, read, _copied(read()))
        if live is None:
            self._computed.append(fact)
        else:
            self._facts.append(fact)
            self._live.append(live)

    def _add_modules(self, above: str, root: nn.Module) -> None:
        """Add ``root`` and all modules below it, then what their attributes and hooks hold."""
        followed: list[tuple[str, object]] = []
        for path, module in placed_modules(root):
            if id(module) in self._reached:
                continue
            self._reached[id(module)] = module
            name = f"{above} › {path}" if above else path
            where = f"the module {name!r}" if name else "the model"
            self._modules[where] = module
            attributes, tensors = partial(attributes_of, module), partial(tensors_of, module)
            hooks = partial(hooks_of, module)
            self._add(f"the attribute {{name!r}} of {where} was changed", attributes, vars(module))
            *held, children = tables_of(module)
            for members in held:
                self._add(f"a parameter or buffer of {where} was replaced", tensors, members)
            self._add(f"a child module of {where} was replaced", partial(dict, children), children)
            for table in hook_tables(module):
                self._add(f"{where} has other hooks", hooks, table)
            for key, tensor in tensors().items():
                self._follow(join(name, key), tensor)
            followed += [(join(name, key), value) for key, value in attributes().items()]
            followed += [(name, hook) for hook in hooks().values()]
            followed.append((join(name, "config"), getattr(module, "config", None)))
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
            read, live = partial(_parts, part), _container(part)
            parts = read()
            if isinstance(part, torch.Tensor):
                self._tensors.append((name, part))
            elif is_config(part):
                self._add("config.{name} was changed", read, vars(part))
                what = "another function is registered for the attention implementation"
                self._add(what, partial(attention_of, part))
            elif live is not None or (parts and not isinstance(part, tuple)):
                self._add(f"{name!r} holds something that was changed", read, live)
            waiting += reversed([*parts, *parts.values()])


class _Fact(NamedTuple):
    """Members of a container that decide numbers: how to read them, and what they were."""

    what: str
    read: Callable[[], Mapping[Any, Any]]
    before: dict[Any, Any]

    def changed(self) -> str | None:
        """Return what changed, in words; None if only what decides nothing did."""
        now = self.read()
        for name in [*now, *(name for name in self.before if name not in now)]:
            if not _same(self.before.get(name, _MISSING), now.get(name, _MISSING)):
                return self.what.format(name=name)
        return None


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of ``value`` on which its behaviour depends, by name or number.

    Parts are elements of containers, arguments of a partial function, closures and defaults of
    functions, and attributes of configurations and of objects from outside of `LIBRARIES`. Modules
    and tensors have no parts.
    """
    numbered: Iterable[Any] = ()
    if is_config(value):
        return config_of(value)
    if isinstance(value, list | tuple):
        numbered = value
    elif isinstance(value, functools.partial):
        return dict(enumerate((value.func, *value.args))) | value.keywords
    elif isinstance(value, types.MethodType):
        numbered = (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        numbered = held_by(value)
    elif (named := _container(value)) is not None:
        return dict(named)
    return dict(enumerate(numbered))


def _container(value: Any) -> Any:
    """Return where ``value`` holds its parts, to compare them in one operation; None: nowhere."""
    if isinstance(value, dict | list):
        return value
    if isinstance(value, torch.Tensor | type) or not hasattr(value, "__dict__"):
        return None
    return None if package_of(type(value)) in LIBRARIES else vars(value)


def _methods(kind: type) -> dict[str, Any]:
    members = vars(kind).items()
    return {f"{kind.__qualname__}.{name}": value for name, value in members if callable(value)}


def _copied(members: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: _copy(value) for name, value in members.items()}


def _copy(value: Any) -> Any:
    """Return a copy of what can be changed in place; other objects are compared by identity."""
    return copy.deepcopy(value) if is_plain(value) else value


def _same(before: object, now: object) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and is_plain(before) and is_plain(now) and bool(before == now)


# --- tensors -------------------------------------------------------------------------------------


def _state(tensor: Tensor) -> tuple[object, ...]:
    """Return values that change when the tensor is written to or moved."""
    version = None if tensor.is_inference() else tensor._version
    if tensor.layout is not torch.strided:
        return version, 0, ()
    wraps = hasattr(tensor, "__tensor_flatten__")
    return version, 0 if wraps else tensor.data_ptr(), tensor.stride()


def _samples(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return views of a few bytes of each tensor, by device."""
    views: dict[torch.device, list[Tensor]] = {}
    with torch.inference_mode():
        for tensor in tensors:
            wraps = hasattr(tensor, "__tensor_flatten__")
            if tensor.layout is not torch.strided or wraps or not tensor.numel():
                continue  # it has no memory of its own
            storage = tensor.untyped_storage()
            begin = tensor.storage_offset() * tensor.element_size()
            room = min(tensor.nbytes, storage.nbytes() - begin)
            count = min(SAMPLES, room)
            step = max(1, room // count)
            step -= step > 1 and step % 2 == 0  # odd, to sample different bytes of elements
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            view.set_(storage, begin, (count,), (step,))
            views.setdefault(tensor.device, []).append(view)
    return [*views.values()]


def _bytes_of(views: list[Tensor]) -> Tensor:
    with torch.inference_mode():
        return torch.cat(views)
