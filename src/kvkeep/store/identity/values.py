"""Attributes, functions and classes as text: equal texts, equal behaviour, in every process.

Plain values are written out. A function or class from `LIBRARIES` is written as its name, because
the version of the library decides what it does. Any other function or class is written as its byte
code, defaults and closures, so two classes of one name with different ``forward`` differ.
An object of an unknown class is written as its class and its attributes. Globals that a function
reads are not followed.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvkeep.errors import require

if TYPE_CHECKING:
    from kvkeep.store.identity.tensors import TensorDigests

__all__ = [
    "LIBRARIES", "NEUTRAL_CONFIG", "ValueWriter", "config_of", "is_config", "is_plain",
    "package_of",
]  # fmt: skip

LIBRARIES: Final = frozenset(
    {"torch", "transformers", "peft", "accelerate", "builtins", "functools", "numpy", "kvkeep"}
)
"""Packages whose classes and functions are written by name."""

NEUTRAL_CONFIG: Final = frozenset({
    # names and notes
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures",
    "_post_init_done", "model_type",
    # what is made of logits, and what is returned besides
    "bos_token_id", "eos_token_id", "id2label", "label2id", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "use_cache",
})  # fmt: skip
"""Attributes of configurations that do not change KV; a test changes each of them."""

_PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device,
    enum.Enum,
)  # fmt: skip
_DEPTH: Final = 6  # of objects in objects; deeper ones are named by their class


def package_of(value: object) -> str:
    """The package that ``value``, a class or function, comes from."""
    return str(getattr(value, "__module__", None) or "builtins").partition(".")[0]


def is_plain(value: object) -> bool:
    """Whether ``value`` is made of numbers, texts and containers of these alone."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def is_config(value: object) -> bool:
    """Whether ``value`` is a model's configuration, as Transformers makes them."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def config_of(config: Any) -> dict[str, Any]:
    """The attributes of a configuration that may decide a number, defaults included."""
    return {name: value for name, value in vars(config).items() if name not in NEUTRAL_CONFIG}


class ValueWriter:
    """Writes values as text. Thread safety: none."""

    def __init__(self, digests: TensorDigests) -> None:
        self._digests = digests
        self._above: list[int] = []  # what is being written, for cycles
        self._depth = 0  # in objects of unknown classes

    def write(self, value: object) -> str:
        """The text of ``value``."""
        if isinstance(value, torch.device):
            return "device"  # where numbers are computed is no part of the identity
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")  # configurations hold either
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
            return self._class(value)
        if isinstance(value, functools.partial):
            return f"partial({self.write([value.func, value.args, value.keywords])})"
        if isinstance(value, types.MethodType):
            return f"method({self.write(value.__func__)} of {self.write(value.__self__)})"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            parts = [getattr(value, name, None) for name in ("fget", "__func__", "func")]
            return f"{type(value).__name__}({self.write([part for part in parts if part])})"
        if is_config(value):
            return f"<{_name(type(value))} {self.write(config_of(value))}>"
        if isinstance(value, torch.nn.Module):
            return f"<module {_name(type(value))}>"  # its tree stands elsewhere
        return self._object(value)

    def _object(self, value: Any) -> str:
        """Class and attributes; of a library's object its class, and its name if it has one."""
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
        """Name, and what classes outside of `LIBRARIES` define."""
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
        name = f"{function.__module__}.{function.__qualname__}"
        if package_of(function) in LIBRARIES and "<locals>" not in name:
            return name
        parts: list[object] = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # not filled yet
                parts.append("empty cell")
        text = f"{_code(function.__code__)} {self.write(parts)}"
        return f"{name}={_digest(text.encode('utf-8', 'surrogatepass'))}"


def _code(code: types.CodeType) -> str:
    """Byte code with its constants and names; without the file and the lines it stands at."""
    constants = [
        _code(each) if isinstance(each, types.CodeType) else _constant(each)
        for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {constants} {names}"


def _constant(value: object) -> str:
    if isinstance(value, frozenset):  # its order differs between processes
        return repr(sorted(map(repr, value)))
    return repr(value)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(data: bytes) -> str:
    return str(require("xxhash", "store").xxh3_128_hexdigest(data))
