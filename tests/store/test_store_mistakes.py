"""The caller's mistakes: each is named, with what would be right, and nothing changes."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from store_kv import GEOMETRIES, GQA, MODEL, disk, get, given, numbers, open_store, put, room

from kvkeep.core.errors import IllegalStep, InvalidValue, UnsupportedModel
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.store import KVStore, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvkeep.store import StoreStats

TOKENS = range(8)


def kv(count: int = 8, form: str = "tensor", layout: str = "NHD") -> Any:
    return given(GQA, numbers(GQA, range(count)), form, layout)


class NoForm:
    """Holds KV, in a form that nobody knows."""


# What is called with a store, and what the message has to say.
CALLS: dict[str, tuple[Callable[[KVStore], object], tuple[str, ...]]] = {
    "tokens of two prompts": (lambda s: s.put([[1, 2]], kv(2)), ("one row", "(1, 2)")),
    "tokens of text": (lambda s: s.get("abc"), ("tokens", "str")),
    "a negative token": (lambda s: s.lookup([1, -2]), ("-2", "position 1")),
    "a fraction of a token": (lambda s: s.prefetch([1.5]), ("integer", "float64")),
    "tokens of nothing": (lambda s: s.pin(None, 1), ("tokens",)),
    "start before": (lambda s: s.put(TOKENS, kv(), -1), ("start is -1", "0 … 8")),
    "start behind": (lambda s: s.get(TOKENS, 9), ("start is 9", "0 … 8")),
    "start between": (lambda s: s.get(TOKENS, 1.0), ("start is 1.0", "whole number")),
    "start is a bool": (lambda s: s.prefetch(TOKENS, True), ("start is True",)),
    "kv of other tokens": (
        lambda s: s.put(TOKENS, kv(7)),
        ("(2, 2, 7, 2, 8)", "8 tokens", "NHD", "(2, 2, 8, 2, 8)"),
    ),
    "kv of all, start in the middle": (lambda s: s.put(TOKENS, kv(8), 2), ("6 tokens",)),
    "kv of another dtype": (
        lambda s: s.put(TOKENS, kv().view(torch.float16)),
        ("torch.float16", "torch.bfloat16"),
    ),
    "kv of another layout": (
        lambda s: s.put(TOKENS, kv(layout="HND")),
        ("(2, 2, 2, 8, 8)", "NHD", "(2, 2, 8, 2, 8)"),
    ),
    "kv of too few layers": (lambda s: s.put(TOKENS, kv(form="tuples")[:1]), ("1 layers", "2")),
    "a part of other tokens": (
        lambda s: s.put(TOKENS, (kv(form="tuples")[0], kv(7, "tuples")[1])),
        ("layer 1", "(7, 2, 8)", "(8, 2, 8)"),
    ),
    "a part of another dtype": (
        lambda s: s.put(TOKENS, tuple((k.float(), v) for k, v in kv(form="tuples"))),
        ("layer 0", "torch.float32", "torch.bfloat16"),
    ),
    "a batch of two": (
        lambda s: s.put(TOKENS, tuple((k.repeat(2, 1, 1, 1), v) for k, v in kv(form="batched"))),
        ("layer 0", "(2, 8, 2, 8)", "batch of 1"),
    ),
    "a layer without values": (
        lambda s: s.put(TOKENS, [(k,) for k, _ in kv(form="tuples")]),
        ("layer 0", "pair (k, v)"),
    ),
    "a layer of arrays": (
        lambda s: s.put(TOKENS, [(np.zeros(1), np.zeros(1))] * 2),
        ("layer 0", "pair (k, v)"),
    ),
    "kv of nothing": (lambda s: s.put(TOKENS, None), ("kv is NoneType", "tensor")),
    "kv of a cache": (lambda s: s.put(TOKENS, NoForm()), ("kv is NoForm", "tensor")),
    "kv that is used up": (lambda s: s.put(TOKENS, iter(kv(form="tuples"))), ("tuple", "list")),
    "kv of an array": (lambda s: s.put(TOKENS, np.zeros((2, 2, 8, 2, 8))), ("kv is ndarray",)),
    "an unknown form": (lambda s: s.get(TOKENS, form="numpy"), ("'numpy'", "'tensor'", "'tuples'")),
    "out too short": (lambda s: s.get(TOKENS, out=room(GQA, 7, "tensor")), ("7", "8 tokens")),
    "out of arrays": (lambda s: s.get(TOKENS, out=np.zeros(1)), ("ndarray",)),
    "out without places": (
        lambda s: s.get(TOKENS, out=torch.zeros(1, dtype=torch.bfloat16).expand(2, 2, 8, 2, 8)),
        ("out", "strides", "torch.empty"),
    ),
    "a layer of out without places": (
        lambda s: s.get(
            TOKENS, out=[(torch.zeros(8, 2, 1, dtype=torch.bfloat16).expand(8, 2, 8),) * 2] * 2
        ),
        ("out", "strides"),
    ),
    "deadline as text": (lambda s: s.get(TOKENS, deadline="5s"), ("deadline is '5s'", "seconds")),
    "no number as deadline": (lambda s: s.get(TOKENS, deadline=float("nan")), ("deadline is nan",)),
    "deadline as a bool": (lambda s: s.get(TOKENS, deadline=True), ("deadline is True",)),
    "a pin for no time": (lambda s: s.pin(TOKENS, 0), ("seconds is 0", "above zero")),
    "a pin for ever": (lambda s: s.pin(TOKENS, float("inf")), ("seconds is inf", "ends")),
    "a pin back in time": (lambda s: s.pin(TOKENS, -1), ("seconds is -1",)),
    "a pin of text": (lambda s: s.pin(TOKENS, "60"), ("seconds is '60'",)),
    "a flush of text": (lambda s: s.flush("5"), ("timeout is '5'", "seconds")),
    "a close for no number": (lambda s: s.close(None), ("timeout is None",)),
    "a tenant that is a number": (lambda s: s.put(TOKENS, kv(), tenant=7), ("tenant is 7", "text")),
    "a tenant that is a list": (lambda s: s.get(TOKENS, tenant=["a"]), ("tenant is ['a']",)),
    "a tenant of bytes": (lambda s: s.clear(tenant=b"a"), ("tenant is b'a'",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def store() -> Iterator[KVStore]:
    with open_store() as store:
        put(store, range(4))
        yield store


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_and_nothing_changes(name: str, store: KVStore) -> None:
    call, words = CALLS[name]
    before = store.stats()
    with pytest.raises(InvalidValue) as caught:
        call(store)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert changed(before, store.stats()) == {}
    assert get(store, range(8)) == 4
    store.check()


def test_a_prefetch_waits_for_a_number_of_seconds(store: KVStore) -> None:
    prefetch = store.prefetch(TOKENS)
    with pytest.raises(InvalidValue, match="timeout is '5'"):
        prefetch.wait("5")  # type: ignore[arg-type]
    assert prefetch.wait(20)  # it counts nothing in the tests that follow


def changed(before: StoreStats, after: StoreStats) -> dict[str, object]:
    """Return the figures that differ, by name: pytest shortens the comparison of two such."""
    first, second = dict(flat("", asdict(before))), dict(flat("", asdict(after)))
    return {
        name: (first.get(name), second[name]) for name in second if first.get(name) != second[name]
    }


def flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from flat(f"{name}.{key}", inner)
    else:
        yield name, value


def test_who_waits_for_ever_waits_as_long_as_it_takes(store: KVStore) -> None:
    assert store.prefetch(range(4)).wait(float("inf")) == 4
    assert store.flush(float("inf"))
    _, n = store.get(range(4), deadline=float("inf"))
    assert n == 4


def test_uneven_parts_do_not_fit_one_tensor() -> None:
    shape = GEOMETRIES["uneven"]
    with (
        open_store(shape=shape) as store,
        pytest.raises(InvalidValue, match=r"8 elements and values 4.*a pair for each layer"),
    ):
        store.put(range(4), torch.zeros(2, 2, 4, 2, 8, dtype=torch.bfloat16))


def test_latent_parts_are_no_pairs() -> None:
    shape = GEOMETRIES["mla"]
    part = torch.zeros(4, 16, dtype=torch.bfloat16)
    with (
        open_store(shape=shape) as store,
        pytest.raises(InvalidValue, match="layer 0 of kv is 2 parts; it is one tensor"),
    ):
        store.put(range(4), [(part, part)] * 2)


@pytest.mark.parametrize(("layer", "given"), [((1, 2, 3), "3 parts"), ("kv", "str")])
def test_what_is_no_pair_is_told(layer: object, given: str) -> None:
    said = rf"layer 0 of kv is {given}; it is a pair \(k, v\) of tensors"
    with open_store() as store, pytest.raises(InvalidValue, match=said):
        store.put(range(4), [layer] * 2)


STORES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no revision": ({"model": "tiny"}, ("'tiny'", "name@revision", "directory")),
    "an empty revision": ({"model": "tiny@"}, ("without a revision",)),
    "an empty name": ({"model": "@1"}, ("model is ''",)),
    "no model": ({"model": ""}, ("model is ''",)),
    "a model that is no text": ({"model": None}, ("model is None", "torch.nn.Module")),
    "a revision that is no text": ({"model": "tiny", "revision": 3}, ("revision is 3", "text")),
    "a LoRA that is no text": ({"lora": 3}, ("lora is 3", "text")),
    "a layout of its own": ({"layout": "DNH"}, ("'DNH'", "'NHD'", "'HND'")),
    "blocks of nothing": ({"block_tokens": 0}, ("block_tokens is 0", "1 …")),
    "blocks of half a token": ({"block_tokens": 0.5}, ("block_tokens is 0.5",)),
    "blocks too large": ({"block_tokens": 1 << 21}, ("block_tokens is 2097152", "1048576")),
    "no tiers": ({"tiers": ()}, ("tiers are a list", "()")),
    "one tier and no list": ({"tiers": "memory://1GiB"}, ("tiers are a list", "memory://1GiB")),
    "a tier that is no URL": ({"tiers": ["/var/kv"]}, ("'/var/kv'", "memory://4GiB")),
    "an unknown tier": ({"tiers": ["tape://1"]}, ("tape", "memory", "file")),
    "an unknown option": ({"tiers": ["memory://1MiB?colour=red"]}, ("colour", "size")),
    "an unknown codec": ({"tiers": ["memory://1MiB?codec=zip"]}, ("'zip'", "lossless")),
    "no geometry": ({"shape": "llama"}, ("geometry is 'llama'", "KVGeometry")),
    "a policy by name": ({"policy": "lru"}, ("policy is 'lru'", "Inclusive()")),
    "a quota of words": ({"quotas": {"a": "much"}}, ("'much'", "24GiB")),
    "a quota of nobody": ({"quotas": {5: "1MiB"}}, ("tenant is 5",)),
    "a quota below zero": ({"quotas": {"a": -1}}, ("-1",)),
}


@pytest.mark.parametrize("name", STORES)
def test_a_wrong_store_is_refused_and_leaves_no_thread(name: str) -> None:
    options, words = STORES[name]
    before = threading.active_count()
    with pytest.raises(InvalidValue) as caught:
        open_store(**options)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert threading.active_count() == before


def test_a_wrong_tier_closes_those_that_were_opened(tmp_path: Path) -> None:
    urls = ["memory://1MiB", disk(tmp_path / "d"), "tape://1"]
    with pytest.raises(InvalidValue, match="tape"):
        KVStore(GQA, model=MODEL, tiers=urls)
    with open_store(*urls[:2]) as store:
        assert put(store, range(8), wait=True).tokens == 8


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store("memory://1MiB", disk(tmp_path / "d"))
    put(store, range(8))
    assert store.close()
    assert store.close()
    for call in (
        lambda: put(store, range(8)),
        lambda: put(store, range(20, 28)),
        lambda: store.get(range(8)),
        lambda: store.prefetch(range(8)),
        lambda: store.lookup(range(8)),
        lambda: store.touch(range(8)),
        lambda: store.pin(range(8), 60.0),
        lambda: store.unpin(range(8)),
        store.clear,
    ):
        with pytest.raises(IllegalStep, match="closed"):
            call()
    assert store.stats().puts == 1
    with open_store("memory://1MiB", disk(tmp_path / "d")) as again:
        assert again.lookup(range(8)).tokens == 8, "nothing was deleted"


def test_layers_that_differ_need_snapshots() -> None:
    state = (StateTensor("recurrent", (4, 8, 8), "float32"),)
    full = LayerGroup("full", (1,), AttentionShape(2, 8))
    geometry = KVGeometry.of([full, LayerGroup("state", (0,), state=state)])
    with pytest.raises(UnsupportedModel, match=r"snapshots=False\) needs .* keeps full attention"):
        KVStore(geometry, model=MODEL, snapshots=False)
    with KVStore(geometry, model=MODEL) as store:
        assert store.snapshots
        with pytest.raises(UnsupportedModel, match="use put_snapshot instead of put"):
            store.put([1], torch.zeros(1))
        with pytest.raises(UnsupportedModel, match="use get_snapshot instead of get"):
            store.get([1])
    with open_store() as store:
        assert not store.snapshots
        with pytest.raises(
            UnsupportedModel, match=r"put_snapshot needs KVStore\(…, snapshots=True"
        ):
            store.put_snapshot([1], Snapshot(1, 0))
        with pytest.raises(
            UnsupportedModel, match=r"get_snapshot needs KVStore\(…, snapshots=True"
        ):
            store.get_snapshot([1])
