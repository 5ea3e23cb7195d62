"""Every parameter of the public API, given values of every wrong kind.

Each call does what it says or raises an error of `kvkeep.core.errors`, and the object stays sound:
its `check` holds. What is public is read from the packages, so a new parameter is tested, too.
"""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvkeep
from kvkeep import InvalidValue, KVKeepError, PagedCache, SlotCache
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec
from kvkeep.core.miss_ratio import MissRatioCurve
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.returns import Ended

torch = pytest.importorskip("torch")

from kvkeep import store  # noqa: E402 - needs torch
from kvkeep.store import BlockStore, KVStore, Snapshot  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8, dtype="float32")
LAYOUT = GroupLayout(4, (WindowSpec(5),), StateSpec(1, 1))
PROMPT = [1, 2, 3, 4, 5]
KV = torch.zeros(1, 2, 5, 1, 8)

MADE_HERE = {
    "CacheStats", "CachedPrefix", "PageCopy", "PageTables", "Pin", "Sequence", "SlotCopy",
    "SlotLease", "LoadChoice", "LoadPiece", "Lookup", "Miss", "Prefetch", "Put",
    "Removed", "StoreStats", "choose_load",
}  # fmt: skip
"""Public classes whose objects the library makes: results, and what its methods return."""
NOT_FOR_CALLERS = {
    "PagedCache.drop", "hybrid.drop", "Sequence.adopt", "Sequence.begin_groups", "Sequence.check",
    "SequenceGroups.begin", "SequenceGroups.hold",
    "SequenceGroups.of", "SequenceGroups.published", "SequenceGroups.rewind",
    "PublicPrefixes.begins", "PublicPrefixes.length", "PublicPrefixes.place", "KVStore.close",
    "BlockStore.close", "BlockStore.replay",
}  # fmt: skip
"""Methods that parts of the library call with checked values, and those that end or make stores."""
ARGUMENTS: dict[str, Any] = {
    "answer": 2, "block_tokens": 4, "blocks": [bytes(32)], "buffers": [bytearray(8)],
    "eta": 5.0, "fill": lambda number, view: None, "geometry": GEOMETRY, "hook": lambda event: None,
    "identity": "m@1", "keys": [bytes(32)], "kv": KV, "layer": 0, "length": 3, "max_tokens": 64,
    "memory": np.zeros(4), "model": "m@1", "n": 2, "name": "wrong arguments", "namespace": "space",
    "node": 1, "num_pages": 20, "num_slots": 2, "page_size": 4, "pages": 1,
    "pin": None, "position": 5, "prompt": 2, "seconds": 5.0, "session": "s",
    "sink": lambda number, view: None, "size": 8, "sizes": [8], "snapshot": Snapshot(5, 0),
    "source": "m@1", "span": 4, "start": 0, "stop": 5, "tables": [np.arange(3)],
    "tokens": PROMPT,
}  # fmt: skip
"""A right value for each parameter without a default."""
OTHERWISE: dict[str, dict[str, Any]] = {
    "GroupLayout": {"windows": (WindowSpec(5),)},
    "KVStore.window_start": {"tokens": 5},
    "SequenceGroups.checkpoint": {"position": 4},
}
"""The same for single methods."""
NEEDS_MORE = {"model_identity", "weights_digest", "unpin"}  # files that exist, a pin that is set
WORDS = {
    "node": "namespace", "out": "kv", "quotas": "amount", "rows": "tokens",
    "shares": "tenant", "source": "model", "stop": "end of the pass", "what_if": "sample",
    "full": "model", "kv": "layer", "windows": "groups",
}  # fmt: skip
"""What messages call a parameter, if not by its name."""


class Odd:
    """Looks like a row, and fails when it is read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> int:
        raise RuntimeError("odd")


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def values() -> Iterator[object]:
    yield from (None, "", "abc", "\ud800", b"", b"abcd", 3, -1, 1.5, math.nan, math.inf, True)
    yield from (10**30, -(10**30), 10**400, complex(1), [], [None], ["a"], [1.5], [-1], [2**31])
    yield from ([[1, 2]], [[]], {1: 2}, {1, 2}, (i for i in [1]), range(5), {"a": b"x"})
    yield from ([(0, "x")], [(0,)], [(99, b"x")], object(), Odd(), Nameless(), Odd, print)
    yield from (np.array(5), np.array([1.5]), np.array([[1, 2]]), np.array(["a"]))
    yield from (torch.tensor(3), torch.tensor([1, 2]), torch.tensor([1.5]), KV[:, :, :4])
    yield from (KV.half(), torch.zeros(1, 2, 5, 1, 8, device="meta"), KV.to_sparse())


def objects() -> dict[str, Any]:
    """A new object of each class that callers call methods of, by the name of the class."""
    cache = PagedCache(40, 4, what_if=0.5, eviction="returns")
    with cache.open(PROMPT) as sequence:
        sequence.publish()
    hybrid = PagedCache(40, LAYOUT)
    running = hybrid.open(PROMPT)
    running.copies()
    assert running.groups is not None
    running.groups.copies()
    slots = SlotCache(2, 64)
    return {
        "PagedCache": cache, "hybrid": hybrid,
        "Sequence": running, "SequenceGroups": running.groups,
        "Session": cache.session("s"), "PublicPrefixes": cache.public, "SlotCache": slots,
        "SlotLease": slots.acquire(PROMPT),
    }  # fmt: skip


def methods(name: str, owner: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of an object that take arguments, by their full names."""
    for each in dir(type(owner)):
        if not each.startswith("_") and callable(getattr(type(owner), each)):
            bound = getattr(owner, each)
            if inspect.signature(bound).parameters and f"{name}.{each}" not in NOT_FOR_CALLERS:
                yield f"{name}.{each}", bound


def right_arguments(where: str, call: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a call needs."""
    return {
        name: ARGUMENTS[name]
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    } | OTHERWISE.get(where, {})


def wrong_calls(
    where: str, call: Callable[..., Any], value: object
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls with ``value`` in place of each argument in turn, by the parameter."""
    parameters = inspect.signature(call).parameters
    needed = right_arguments(where, call)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield name, lambda: call(value)
        elif parameter.kind is not parameter.VAR_KEYWORD and not (
            callable(value) and str(parameter.annotation).startswith(("Callable", "Hook"))
        ):
            yield name, lambda name=name: call(**{**needed, name: value})


def unclear(calls: Iterator[tuple[str, Callable[..., Any]]], value: object) -> Iterator[str]:
    """What is raised that is no error of kvkeep's, or names no parameter."""
    for where, call in calls:
        words = [*inspect.signature(call).parameters]
        words += [WORDS[name] for name in words if name in WORDS]
        for name, attempt in wrong_calls(where, call, value):
            try:
                result = attempt()
            except InvalidValue as error:
                if type(error) is InvalidValue and not any(
                    word.rstrip("s") in str(error) for word in words
                ):
                    yield f"{where}({name}={_shown(value)}) names no parameter: {error}"
                continue
            except KVKeepError:
                continue
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                yield f"{where}({name}={_shown(value)}) {type(error).__name__}: {error}"
                continue
            with suppress(KVKeepError):
                if isinstance(result, GeneratorType):
                    list(result)
                elif hasattr(result, "close"):
                    result.close()


def _shown(value: object) -> str:
    try:
        return repr(value)[:40]
    except Exception:  # noqa: BLE001
        return type(value).__name__


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    name: each
    for package in (kvkeep, store)
    for name in package.__all__
    if callable(each := getattr(package, name))
    and not (inspect.isclass(each) and issubclass(each, BaseException))
    and name not in MADE_HERE
} | {
    each.__name__: each
    for each in (GroupLayout, WindowSpec, StateSpec, Ended, MissRatioCurve, PublicPrefixes)
}


def test_the_arguments_that_are_not_replaced_are_right() -> None:
    made = objects()
    calls = [*CONSTRUCTORS.items(), *(each for item in made.items() for each in methods(*item))]
    for where, call in calls:
        try:
            call(**right_arguments(where, call))
        except InvalidValue as error:
            if where.split(".")[-1] not in NEEDS_MORE:
                raise AssertionError(where) from error
        except KVKeepError:
            continue  # a step that the state does not allow


def test_caches() -> None:
    bad: list[str] = []
    for value in values():
        made = objects()
        for name, owner in made.items():
            bad += unclear(methods(name, owner), value)
        for name in ("PagedCache", "hybrid"):
            made[name].check()
    assert not bad, "\n".join(bad)


def test_constructors() -> None:
    bad = [each for value in values() for each in unclear(iter(CONSTRUCTORS.items()), value)]
    assert not bad, "\n".join(bad)


def test_stores() -> None:
    plain = KVStore(GEOMETRY, model="m@1", tiers=["memory://1MiB"], block_tokens=4)
    grouped = KVStore(
        GEOMETRY, model="m@1", tiers=["memory://1MiB"], block_tokens=4, snapshots=True
    )
    blocks = BlockStore("space", tiers=["memory://1MiB"])
    bad: list[str] = []
    for value in values():
        for name, owner in (("KVStore", plain), ("KVStore", grouped), ("BlockStore", blocks)):
            bad += unclear(methods(name, owner), value)
    for owner in (plain, grouped, blocks):
        owner.check()
        owner.close()
    assert not bad, "\n".join(bad)
