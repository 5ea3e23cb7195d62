"""A pytest plugin that runs tests marked ``cuda`` on an emulated GPU.

    pytest -p emulated_gpu -m cuda tests/pages

Tensors of the emulated device are not on the CPU, and the CPU computes what is in them. As on a
GPU, an operation over tensors of several devices raises, and NumPy cannot see a tensor. So it finds
mixed devices without a GPU. It emulates nothing that CUDA alone has: streams, events, pinned memory
and kernels. torch calls backends in Python experimental: `MISSING` says if this torch has none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NAME = "emulated"
DEVICE = f"{NAME}:0"
_SETUP = "_setup_privateuseone_for_python_backend"
MISSING = not hasattr(backend_registration, _SETUP)

_from_data = torch.tensor
# Indices may be on the CPU.
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Emulated(torch.Tensor):
    """A tensor of the emulated device; ``inner`` on the CPU has its elements."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=torch.device(DEVICE),
            requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    is_cuda = True

    def __repr__(self) -> str:
        return f"Emulated({self.inner!r})"

    def numpy(self, *_args, **_how):
        raise TypeError("NumPy cannot see a tensor of another device; use cpu()")

    __array__ = numpy
    __dlpack_device__ = numpy

    def tolist(self):
        return self.inner.tolist()

    def data_ptr(self):
        return self.inner.data_ptr()

    # torch makes tensors of lists below the level of dispatch.
    def new_tensor(self, data, *, dtype=None):
        return _from_data(data, dtype=dtype or self.dtype).to(DEVICE)

    def __getitem__(self, index):
        return super().__getitem__(_tensors_of_lists(index))

    def __setitem__(self, index, value):
        super().__setitem__(_tensors_of_lists(index), value)


def _tensors_of_lists(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_tensors_of_lists, index))
    return _from_data(index) if isinstance(index, list) else index


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; what it makes is on the emulated device if its tensors are."""
    name = func._schema.name
    if name == "aten::_fused_sdp_choice":
        return 0  # attention written out: no kernel is emulated
    tensors: list[torch.Tensor] = []
    _find(args, tensors)
    _find(kwargs.values(), tensors)
    mine = [one for one in tensors if isinstance(one, Emulated)]
    device = kwargs.get("device")
    there = bool(mine) if device is None else torch.device(device).type == NAME
    if not mine and not there and name != "aten::histc":
        return func(*args, **kwargs)  # of the CPU alone
    if name not in {"aten::_to_copy", "aten::copy_"}:
        _check(name, args, mine, [one for one in tensors if not isinstance(one, Emulated)])
    if name == "aten::histc":  # of integers, which a CPU does not count
        args = (args[0].float(), *args[1:])
    made = func(
        *_mapped(_inner, args), **{key: _mapped(_inner, one) for key, one in kwargs.items()}
    )
    known = {id(one.inner): one for one in mine} | {
        id(one): one for one in tensors if not isinstance(one, Emulated)
    }  # what was written in place, or to ``out``

    def wrapped(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or id(one) in known:
            return known.get(id(one), one)
        return Emulated(one) if there else one

    return _mapped(wrapped, made)


def _find(several: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Add the tensors in arguments to ``found``."""
    for one in several:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            _find(one, found)


def _mapped(change: Callable[[Any], Any], one: Any) -> Any:
    """Return ``one`` with all that it lists changed."""
    if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
        return type(one)([_mapped(change, part) for part in one])
    return change(one)


def _inner(one: Any) -> Any:
    if isinstance(one, Emulated):
        return one.inner
    return torch.device("cpu") if isinstance(one, torch.device) and one.type == NAME else one


def _check(name: str, args: Any, mine: list[Emulated], others: list[torch.Tensor]) -> None:
    """Raise where a GPU would: tensors of several devices, other than numbers and indices."""
    if not mine:
        return
    apart = [one for one in others if one.dim()]
    if name in _INDEXED:
        apart = [] if isinstance(args[0], Emulated) else [args[0]]
    if apart:
        raise RuntimeError(
            f"{name} got tensors of several devices: {[tuple(one.shape) for one in apart]} on the "
            f"CPU, {[tuple(one.shape) for one in mine]} on {DEVICE}"
        )


def _attending(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As ``attend``; raises where a fused kernel would read a mask at a misaligned address.

    Where rows lie apart by another number of elements, torch hands the kernel an aligned copy.
    """

    def checked(*args: Any, attn_mask: Any = None, **how: Any) -> torch.Tensor:
        if isinstance(attn_mask, Emulated):
            apart = [stride for stride in attn_mask.stride()[:-1] if stride % 8]
            if not apart and attn_mask.storage_offset() * attn_mask.element_size() % 16:
                raise RuntimeError("misaligned address: a mask does not begin at 16 bytes")
        return attend(*args, attn_mask=attn_mask, **how)

    return checked


class Mode(TorchDispatchMode):
    """Makes new tensors on the emulated device where it is asked for; of one thread."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class _Backend:
    """What torch asks a device's module."""

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def get_rng_state(self, _device=0):
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state, _device=0):
        pass

    def manual_seed_all(self, seed):
        pass


class _NoGradients(contextlib.ContextDecorator):
    """In place of inference mode, whose tensors a wrapper cannot hold."""

    def __init__(self, mode: bool = True) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self._mode)

    def __exit__(self, *_error: object) -> None:
        torch.set_grad_enabled(self._before)


def _moving(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As ``make``, with a ``device`` to which the result is moved."""

    def made(data: Any, *args: Any, device: Any = None, **how: Any) -> torch.Tensor:
        tensor = make(data, *args, **how)
        return tensor if device is None else tensor.to(device)

    return made


def pytest_configure() -> None:
    """Add the device to torch, in this process."""
    from kvkeep.serve.engine.attention import dense
    from kvkeep.store.identity import watch

    getattr(backend_registration, _SETUP)(NAME, backend_module=_Backend())
    torch.tensor, torch.as_tensor = _moving(torch.tensor), _moving(torch.as_tensor)
    for module in (torch.nn.functional, dense):
        module.scaled_dot_product_attention = _attending(module.scaled_dot_product_attention)
    torch.inference_mode = _NoGradients
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    watch._samples = lambda _tensors: []  # views of a storage, which a wrapper has not


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let marked tests run, on the emulated device."""
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "cuda"]
            for name, value in item.callspec.params.items():
                if value == "cuda":
                    item.callspec.params[name] = DEVICE


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fixtures and tests make tensors in the mode."""
    with Mode():
        yield
