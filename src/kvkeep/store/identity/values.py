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
import sys
import types
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvkeep.core.errors import require
from kvkeep.store.identity.neutral import NEUTRAL_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kvkeep.store.identity.tensors import TensorDigests

__all__ = [
    "LIBRARIES", "ValueWriter", "config_of", "is_config", "is_library",
    "is_plain", "package_of", "parts_of",
]  # fmt: skip

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


def parts_of(value: Any) -> list[Any] | None:
    """Return the parts of ``value`` on which its behaviour depends; None if it has none.

    Parts are elements of containers, arguments of a partial function, closures and defaults of
    functions, and attributes of objects from outside of `LIBRARIES`. Modules and tensors have no
    parts.
    """
    if isinstance(value, dict):
        return [each for pair in value.items() for each in pair]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return _held_by(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, *_PLAIN)):
        return None
    if is_config(value) or package_of(type(value)) in LIBRARIES or not hasattr(value, "__dict__"):
        return None
    return [each for pair in vars(value).items() for each in pair]


def _held_by(function: types.FunctionType) -> list[Any]:
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
            return f"{name}{self.write(_held_by(function))}" if "<locals>" in name else name
        read = [
            [each, function.__globals__[each]]
            for each in sorted(_names(code))
            if each in function.__globals__ and _decides(function.__globals__[each])
        ]
        text = f"{_code(code)} {self.write([_held_by(function), read])}"
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
