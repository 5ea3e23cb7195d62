"""Attributes, functions and classes as text: equal texts, equal behaviour, in every process.

Plain values are written out. Functions and classes of `LIBRARIES` are written by name, because the
version of the library decides what they do. Others are written as byte code, defaults and closures,
so that a class of the same name with another ``forward`` differs; of the globals that such a
function reads, functions, classes, tensors and plain constants are followed. An object of an
unknown class is written as its class and attributes.

The package of a function is read from its globals, because `functools.wraps` copies the name of
another module into ``__module__``.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from torch import Tensor

__all__ = [
    "LIBRARIES",
    "NEUTRAL",
    "NEUTRAL_CONFIG",
    "TensorDigests",
    "ValueWriter",
    "config_of",
    "held_by",
    "is_config",
    "is_library",
    "is_plain",
    "package_of",
]

LIBRARIES: Final = frozenset(
    {"torch", "transformers", "peft", "accelerate", "builtins", "functools", "numpy", "kvkeep"}
)
"""Packages whose classes and functions are written by name."""

_PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device,
    enum.Enum,
)  # fmt: skip
_Constant = bool | int | float | complex | str | bytes | torch.dtype
_DEPTH: Final = 6  # of objects in objects; deeper ones are named by their class
NEUTRAL: Final = frozenset(torch.nn.Module().__dict__) | {
    # names and notes
    "config", "name_or_path", "generation_config", "model_tags", "warnings_issued",
    # how the model is loaded, saved and divided among devices
    "_is_hf_initialized", "_is_buffer", "persistent", "_use_kernels",
    "_weight_conversions", "all_tied_weights_keys", "hf_device_map",
    "_hf_hook", "_old_forward", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_no_split_modules",
    "_skip_keys_device_placement", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    # training, and additional outputs
    "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
    "_require_grads_hooks",
    "loss_type", "_loss_function", "_output_capturing_hooks_installed",
    # the same operations, compiled; state of `generate` between its calls
    "_compiled_call", "_compiled_call_impl", "_last_compile_config", "_previous_max_cache_length",
}  # fmt: skip
"""Attributes of modules that do not change KV, or that are described elsewhere."""

NEUTRAL_CONFIG: Final = frozenset({
    # names and notes
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures",
    "_post_init_done", "model_type",
    # use of logits, and additional outputs
    "bos_token_id", "eos_token_id", "id2label", "label2id", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "use_cache",
})  # fmt: skip
"""Attributes of configurations that do not change KV; a test changes each of them."""

PIECE: Final = 16 << 20
"""Bytes of a piece; part of the format of digests."""

_THREADS: Final = min(8, os.cpu_count() or 1)


def package_of(value: object) -> str:
    """Return the package that ``value``, a class or function, comes from."""
    return str(getattr(value, "__module__", None) or "builtins").partition(".")[0]


def is_library(function: object) -> bool:
    """Return whether ``function``, and each function that it wraps, comes from one of `LIBRARIES`.

    A ``functools.partial`` never does: its arguments are the user's.
    """
    while function is not None:
        if isinstance(function, functools.partial):
            return False
        if isinstance(function, types.MethodType):
            function = function.__func__
        if _home(function) not in LIBRARIES:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _home(value: object) -> str:
    """Return the package whose code ``value`` runs, whatever its name is."""
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", "")).partition(".")[0]
    return package_of(value)


def held_by(function: types.FunctionType) -> list[Any]:
    """Return the defaults and the closure of ``function``."""
    parts: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not filled yet
            parts.append("empty cell")
    return parts


def is_plain(value: object) -> bool:
    """Return whether ``value`` consists only of numbers, texts and containers of these."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def is_config(value: object) -> bool:
    """Return whether ``value`` is a model configuration of Transformers."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def config_of(config: Any) -> dict[str, Any]:
    """Return the attributes of a configuration that may decide a number, defaults included."""
    return {name: value for name, value in vars(config).items() if name not in NEUTRAL_CONFIG}


class ValueWriter:
    """Writes values as text. Thread safety: none."""

    def __init__(
        self,
        digests: TensorDigests,
        inside: Container[int],
        describe: Callable[[torch.nn.Module], str],
    ) -> None:
        self._digests = digests
        self._inside = inside  # ids of modules whose tree is described elsewhere
        self._describe = describe  # writes a module outside of the tree, such as a hook calls
        self._above: list[int] = []  # ids of the values being written, to end cycles
        self._depth = 0  # of objects of unknown classes inside of each other
        # Texts of functions and classes by id; the model keeps them alive.
        self._written: dict[int, str] = {}

    def write(self, value: object) -> str:
        """Return the text of ``value``."""
        if isinstance(value, torch.device):
            return "device"  # the device is no part of the identity
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")  # configurations hold dtypes or their names
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return f"tensor {self._digests.of('attribute', value)}"
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            return f"array {array.dtype} {array.shape} {_digest(array.tobytes())}"
        if id(value) in self._above:
            return f"<{_name(type(value))}>"
        self._above.append(id(value))
        try:
            return self._write_deep(value)
        finally:
            self._above.pop()

    def _write_deep(self, value: Any) -> str:
        if isinstance(value, dict):
            pairs = sorted((self.write(key), self.write(each)) for key, each in value.items())
            return "{" + ",".join(f"{key}:{each}" for key, each in pairs) + "}"
        if isinstance(value, set | frozenset):
            return "{" + ",".join(sorted(map(self.write, value))) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self.write, value)) + "]"
        if isinstance(value, type):
            return self._once(value, self._class)
        if isinstance(value, functools.partial):
            return f"partial({self.write([value.func, value.args, value.keywords])})"
        if isinstance(value, types.MethodType):
            return f"method({self.write(value.__func__)} of {self.write(value.__self__)})"
        if isinstance(value, types.FunctionType):
            return self._once(value, self._function)
        if isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            parts = [getattr(value, name, None) for name in ("fget", "__func__", "func")]
            return f"{type(value).__name__}({self.write([part for part in parts if part])})"
        if is_config(value):
            return f"<{_name(type(value))} {self.write(config_of(value))}>"
        if isinstance(value, torch.nn.Module):
            if id(value) in self._inside:
                return f"<module {_name(type(value))}>"
            return f"<module {_name(type(value))} {self._describe(value)}>"
        return self._object(value)

    def _once(self, value: Any, write: Callable[[Any], str]) -> str:
        text = self._written.get(id(value))
        if text is None:
            text = self._written[id(value)] = write(value)
        return text

    def _object(self, value: Any) -> str:
        """Return class and attributes; of an object of a library, its class and any name."""
        kind = type(value)
        if package_of(kind) in LIBRARIES or not hasattr(value, "__dict__"):
            name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
            return f"<{_name(kind)} {package_of(value)}.{name}>" if name else f"<{_name(kind)}>"
        if self._depth >= _DEPTH:
            return f"<{_name(kind)}>"
        self._depth += 1
        try:
            return f"<{self._class(kind)} {self.write(vars(value))}>"
        finally:
            self._depth -= 1

    def _class(self, kind: type) -> str:
        """Return the name, and what classes outside of `LIBRARIES` define."""
        own = [base for base in kind.__mro__ if package_of(base) not in LIBRARIES]
        if not own:
            return _name(kind)
        bodies = [
            [name, each]
            for base in own
            for name, each in sorted(vars(base).items())
            if not name.startswith("__") or name in ("__init__", "__call__")
        ]
        return f"{_name(kind)}={_digest(self.write(bodies).encode('utf-8', 'surrogatepass'))}"

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        name = f"{function.__globals__.get('__name__', '')}.{code.co_qualname}"
        if _home(function) in LIBRARIES:
            # The version decides its code, but not the arguments of a decorator.
            return f"{name}{self.write(held_by(function))}" if "<locals>" in name else name
        read = [
            [each, function.__globals__[each]]
            for each in sorted(_names(code))
            if each in function.__globals__ and _decides(function.__globals__[each])
        ]
        text = f"{_code(code)} {self.write([held_by(function), read])}"
        return f"{name}={_digest(text.encode('utf-8', 'surrogatepass'))}"


def _names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in ``code`` and in the functions inside of it."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _decides(value: object) -> bool:
    """Return whether a global can change results; modules, loggers and caches cannot."""
    if isinstance(value, types.FunctionType | type):
        return _home(value) not in LIBRARIES and _home(value) not in sys.stdlib_module_names
    if isinstance(value, tuple | frozenset):
        return is_plain(value)
    return isinstance(value, torch.Tensor | np.ndarray | _Constant)


def _code(code: types.CodeType) -> str:
    """Return byte code with its constants and names, without file and line numbers."""
    constants = [
        _code(each) if isinstance(each, types.CodeType) else _constant(each)
        for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {constants} {names}"


def _constant(value: object) -> str:
    if isinstance(value, frozenset):  # the order differs between processes
        return repr(sorted(map(repr, value)))
    return repr(value)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(data: bytes) -> str:
    return str(require("xxhash", "store").xxh3_128_hexdigest(data))


class TensorDigests:
    """Digests of the tensors of one model; memory that several tensors share is read once.

    Valid as long as the tensors do not change. Thread safety: none.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[object, ...], str] = {}
        self._read: list[Tensor] = []  # alive, so that no other tensor can take their address

    def read(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read ``(name, tensor)`` pairs in several threads, so that `of` need not read them."""
        new: dict[tuple[object, ...], tuple[str, Tensor]] = {}
        for name, tensor in tensors:
            for part in _parts(name, tensor):
                if (key := _key(part[1])) not in self._digests:
                    new.setdefault(key, part)
        if not new:
            return
        self._read += [part for _, part in new.values()]
        with ThreadPoolExecutor(_THREADS) as threads:
            small = {key: part for key, part in new.items() if part[1].nbytes <= PIECE}
            digests = threads.map(lambda key: _tensor_digest(*small[key], each=map), small)
            self._digests.update(zip(small, digests, strict=True))
            for key in new.keys() - small.keys():
                # One at a time: its pieces use all threads, and only one copy exists.
                self._digests[key] = _tensor_digest(*new[key], each=threads.map)

    def of(self, name: str, tensor: Tensor) -> str:
        """Return the digest of ``tensor`` as hexadecimal text; ``name`` is for messages.

        Raises:
            InvalidValue: the tensor is on the meta device, is not strided, or cannot be read.
        """
        parts = list(_parts(name, tensor))
        self.read(parts)
        digests = ",".join(self._digests[_key(part)] for _, part in parts)
        alone = len(parts) == 1 and parts[0][1] is tensor
        return digests if alone else f"{type(tensor).__name__}({digests})"


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield ``tensor``, or the inner tensors of a subclass that wraps some (a quantised tensor).

    Raises `InvalidValue` if the tensor cannot be read.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for inner in flatten()[0]:
            yield from _parts(f"{name}.{inner}", getattr(tensor, inner))
    elif tensor.is_meta:
        raise InvalidValue(
            f"the weights {name!r} are on no device (meta): load them, or take offloading off, "
            "before KV of this model is kept"
        )
    elif tensor.is_quantized:
        yield f"{name}.int_repr", tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = [tensor.q_scale(), tensor.q_zero_point()]
            yield f"{name}.scale", torch.tensor(scale, dtype=torch.float64)
        else:
            yield f"{name}.scale", tensor.q_per_channel_scales()
            yield f"{name}.zeros", tensor.q_per_channel_zero_points()
            yield f"{name}.axis", torch.tensor(tensor.q_per_channel_axis())
    elif tensor.layout is not torch.strided:
        raise InvalidValue(
            f"the weights {name!r} are {tensor.layout}; only strided tensors can be identified"
        )
    else:
        yield name, tensor


def _key(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.data_ptr(), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _tensor_digest(name: str, tensor: Tensor, each: Callable[..., Iterator[bytes]]) -> str:
    """Return the digest of ``tensor``; ``each`` is the `map` that hashes its pieces."""
    xxhash = require("xxhash", "store")

    def digest(raw: Tensor) -> bytes:  # copied to the host if it lies on another device
        return bytes(xxhash.xxh3_128_digest(raw.cpu().numpy().data))

    shape = ",".join(map(str, tensor.shape))
    whole = xxhash.xxh3_128(f"{tensor.dtype}[{shape}]\n".encode())
    # Inference mode allows views of weights that require gradients.
    with torch.inference_mode():
        try:
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            raw = flat.view(torch.uint8)
            pieces = (raw[at : at + PIECE] for at in range(0, len(raw), PIECE))
            for piece in each(digest, pieces):
                whole.update(piece)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise InvalidValue(
                f"the weights {name!r} ({tensor.dtype} on {tensor.device}) cannot be read: {error}"
            ) from error
    return str(whole.hexdigest())
