"""The error tree: what catches what, and messages that a person can act on."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

import kvkeep
from kvkeep.core import errors
from kvkeep.core.errors import (
    BackendFailed,
    IllegalStep,
    InvalidValue,
    KVKeepError,
    MissingExtra,
    NotCached,
    OutOfPages,
    OutOfRoom,
    OutOfSlots,
    QueueFull,
    UnsupportedModel,
    require,
    whole,
)

TREE = {
    InvalidValue: ValueError,
    UnsupportedModel: ValueError,
    IllegalStep: RuntimeError,
    OutOfPages: MemoryError,
    OutOfSlots: MemoryError,
    QueueFull: RuntimeError,
    OutOfRoom: MemoryError,
    BackendFailed: OSError,
    NotCached: LookupError,
    MissingExtra: ImportError,
}


@pytest.mark.parametrize(("error", "builtin"), TREE.items(), ids=lambda kind: kind.__name__)
def test_each_is_also_the_builtin_that_fits(error: type, builtin: type) -> None:
    assert issubclass(error, KVKeepError)
    assert issubclass(error, builtin)


def test_the_tree_is_complete_and_drawn() -> None:
    kinds = {
        value for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }  # fmt: skip
    assert kinds == {*TREE, KVKeepError}
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+) (?:\((\w+)\))?", errors.__doc__)
    assert {name for name, _ in drawn} == {kind.__name__ for kind in TREE}
    for name, builtin in drawn:
        assert not builtin or TREE[getattr(errors, name)].__name__ == builtin
    for kind in kinds:
        assert getattr(kvkeep, kind.__name__) is kind, "users catch it from the package"


def test_out_of_pages_says_what_to_do() -> None:
    error = OutOfPages(5, 3, 8)
    assert (error.needed, error.available, error.total) == (5, 3, 8)
    assert "5 pages are needed and 3 can be had" in str(error)
    assert "close sequences, or give the pool more pages" in str(error)


def one_of_each() -> list[KVKeepError]:
    return [
        KVKeepError("a"), InvalidValue("b"), UnsupportedModel("c"), IllegalStep("d"),
        OutOfPages(5, 3, 8), NotCached("f"), MissingExtra("g", name="torch"),
    ]  # fmt: skip


@pytest.mark.parametrize("error", one_of_each(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_can_be_copied_and_pickled(error: KVKeepError, again: Any) -> None:
    same = again(error)
    assert type(same) is type(error)
    assert str(same) == str(error)
    assert vars(same) == vars(error)


def _run_out() -> None:
    kvkeep.PagedCache(num_pages=2, page_size=4).open(range(100))


def test_errors_come_back_from_a_worker_process() -> None:
    """An exception that cannot be unpickled breaks the whole pool."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(OutOfPages) as caught:
            pool.submit(_run_out).result(timeout=120)
        assert caught.value.needed == 25
        assert pool.submit(len, "abc").result(timeout=120) == 3, "the pool lives on"


# --- require ---------------------------------------------------------------------------------


def test_require_gives_the_module() -> None:
    assert require("json.decoder", "cli") is sys.modules["json.decoder"]


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'kvkeep[torch]'")) as caught:
        require("torch", "torch")
    assert str(caught.value).startswith("torch is needed here")
    assert caught.value.name == "torch"
    assert caught.value.__cause__ is caught.value.__context__ is None, "said once"
    with pytest.raises(MissingExtra, match="nosuchpackage is needed here"):
        require("nosuchpackage.inner", "cli")


def test_a_package_that_is_there_but_broken_is_not_called_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import a_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing") as caught:
        require("half_installed", "torch")
    assert not isinstance(caught.value, MissingExtra)


# --- whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, np.int8(3), np.uint64(3), np.array(3)], ids=repr)
def test_whole_numbers(number: Any) -> None:
    assert whole("n", number, 1, 3) == 3
    assert type(whole("n", number)) is int


@pytest.mark.parametrize(
    "other", [True, np.True_, 3.0, "3", None, [3], np.float32(3), np.array([3, 4])]
)
def test_what_is_no_whole_number_is_refused(other: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^the count is .*; a whole number is needed"):
        whole("the count", other)


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (0, 1, None, "n is 0; a whole number of at least 1"),
        (-1, 0, 5, "n is -1; a whole number in 0 … 5"),
        (6, 0, 5, "n is 6;"),
    ],
)
def test_bounds(value: int, low: int, high: int | None, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        whole("n", value, low, high)
