"""The kits of SGLang's wheel on a machine without a GPU: importing this imports them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from types import ModuleType

# The kits import SGLang's benchmarks, which import this package of data sets; no kit uses any.
_SETS = ModuleType("datasets")
_SETS.load_dataset = None  # type: ignore[attr-defined]
sys.modules.setdefault("datasets", _SETS)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Triton's, which has no GPU
    from sglang.test.kits import unified_radix_cache

    MODULES = [
        importlib.import_module(f"{unified_radix_cache.__name__}.{module.name}")
        for module in pkgutil.iter_modules(unified_radix_cache.__path__)
        if not module.name.startswith("rust_")  # needs Rust sources, which are not in the wheel
    ]
    """The modules of the kits, in the order of their names."""
