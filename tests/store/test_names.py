"""Names: what must not be mixed does not find each other; ids are those of docs/keys.md."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from store_kv import GEOMETRIES, GQA, counter, disk, get, numbers, open_store, put, records

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.keys import Namespace, root_key
from kvkeep.serve.models import bundled_model
from kvkeep.store import KVStore, model_identity
from kvkeep.store.kv.names import Names, store_namespace

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = range(16)
TINY = bundled_model()
BASE: dict[str, Any] = {
    "shape": KVGeometry(2, 4, 8, "bfloat16", tp=2), "model": "m", "revision": "r", "lora": "l",
    "rank": "tp0/2", "tenant": "t", "layout": "NHD", "block_tokens": 4,
}  # fmt: skip
OTHER: dict[str, Any] = {
    "model": "n", "revision": "s", "lora": "k", "rank": "tp1/2", "tenant": "u", "layout": "HND",
    "block_tokens": 8,
}  # fmt: skip
# Of each the bytes of a token are as many: lengths cannot tell them apart.
SHAPES = {
    "dtype": replace(BASE["shape"], dtype="float16"),
    "dtype of one byte": KVGeometry(2, 8, 8, "int8", tp=2),
    "layers": KVGeometry(4, 2, 8, tp=2),
    "heads": KVGeometry(2, 8, 4, tp=2),
    "ranks": KVGeometry(2, 8, 8, "float8_e5m2", tp=2),
    "values": KVGeometry(2, 4, 4, value_dim=12, tp=2),
    "latent": KVGeometry(2, 1, 32, latent_dim=24, tp=2),
    "latent of another width": KVGeometry(2, 1, 32, latent_dim=16, tp=2),
}


# Blocks that are stored already are found by these texts.
TEXTS = [
    (KVGeometry(2, 4, 8), "2x4x8"),
    (KVGeometry(2, 4, 8, tp=2), "2x2x8"),
    (KVGeometry(2, 4, 4, value_dim=12), "2x4x4/v12"),
    (KVGeometry(2, 1, 32, latent_dim=24), "2x1x32/latent24"),
]


def finds(url: str, **options: Any) -> int:
    with open_store("memory://1MiB", url, **(BASE | options)) as store:
        asked = store.lookup(TOKENS).tokens
        assert get(store, TOKENS) == asked
        return asked


@pytest.mark.parametrize(("shape", "text"), TEXTS, ids=[text for _, text in TEXTS])
def test_the_shape_in_a_name_stays_as_it_is(shape: KVGeometry, text: str) -> None:
    named = {"model": "m", "revision": "r", "tenant": "", "lora": "", "rank": "tp0/2"}
    space = store_namespace(shape, "NHD", 4, **named)
    assert (space.geometry, space.layout, space.dtype) == (text, "NHD/4", "bfloat16")


def test_what_must_not_be_mixed_does_not_find_each_other(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with open_store("memory://1MiB", url, **BASE) as store:
        put(store, TOKENS)
    assert finds(url) == 16
    for name, value in OTHER.items():
        assert finds(url, **{name: value}) == 0, name
    assert finds(url, lora="") == finds(url, tenant="") == 0
    for name, shape in SHAPES.items():
        assert shape.bytes_per_token == BASE["shape"].bytes_per_token, name
        assert finds(url, shape=shape) == 0, name
    assert finds(url) == 16


def test_every_geometry_has_a_namespace_of_its_own() -> None:
    shapes = [BASE["shape"], *SHAPES.values()]
    assert len({namespace("m@1", shape, rank="tp0/2") for shape in shapes}) == len(shapes)


def test_windows_and_names_written_otherwise_do_find_each_other(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with open_store("memory://1MiB", url, **BASE) as store:
        put(store, TOKENS)
    assert finds(url, model="m@r", revision="") == 16
    assert finds(url, shape=replace(BASE["shape"], dtype="bf16")) == 16


def test_fields_cannot_pretend_to_be_others(tmp_path: Path) -> None:
    """Where a name ends is part of the key."""
    url = disk(tmp_path / "d")
    with open_store("memory://1MiB", url, **(BASE | {"model": "a", "revision": "b@c"})) as store:
        put(store, TOKENS)
    assert finds(url, model="a", revision="b@c") == 16
    assert finds(url, model="a@b", revision="c") == 0
    assert finds(url, model="a@b@c", revision="") == 0  # that is a@b at c
    assert finds(url, model="a", revision="b@c", tenant="t\nlora=1:l", lora="") == 0


def test_the_tenant_of_a_call(tmp_path: Path) -> None:
    with open_store("memory://1MiB", disk(tmp_path / "d"), tenant="own") as store:
        put(store, TOKENS)
        put(store, TOKENS, tenant="other", wait=True)
        assert get(store, TOKENS) == 16
        assert get(store, TOKENS, tenant="own") == 16
        assert get(store, TOKENS, tenant="other") == 16
        assert get(store, TOKENS, tenant="") == 0
        assert store.lookup(TOKENS, tenant="").tokens == 0
        assert store.prefetch(TOKENS, tenant="").wait(5) == 0
        assert store.pin(TOKENS, 5, tenant="") == 0
        assert store.clear(tenant="").bytes == 0
        assert len(records(tmp_path / "d")) == 8
        assert store.clear().bytes > 0
        assert get(store, TOKENS) == 0
        assert get(store, TOKENS, tenant="other") == 16


def test_more_tenants_than_are_remembered() -> None:
    with open_store("memory://1MiB") as store:
        put(store, TOKENS, tenant="first")
        for number in range(5000):
            assert store.lookup(range(4), tenant=str(number)).tokens == 0
        assert get(store, TOKENS, tenant="first") == 16


def test_two_loras_in_one_directory_have_their_own_quota_and_clear(tmp_path: Path) -> None:
    url = disk(tmp_path / "d")
    with open_store(url, lora="a@1") as one, open_store(url, lora="b@1") as two:
        put(one, TOKENS, wait=True)
        put(two, TOKENS, wait=True)
        assert one.clear().bytes > 0
        assert get(one, TOKENS) == 0
        assert get(two, TOKENS) == 16


# --- quotas ----------------------------------------------------------------------------------


def held(store: KVStore, tenant: str) -> int:
    """Blocks of a tenant that are in memory."""
    space = store._names.of(tenant).space
    return sum(item.block.startswith(space) for item in store._tiered.memory.backend.list())


def test_a_tenant_over_its_quota_pays_with_its_own_blocks() -> None:
    record = 128 + 4 * GQA.bytes_per_token
    with open_store("memory://4MiB", quotas={"small": 10 * record}) as store:
        put(store, range(200), tenant="large")
        for first in range(0, 400, 40):
            put(store, range(first, first + 40), tenant="small")
            assert held(store, "small") <= 10
        assert get(store, range(360, 400), tenant="small") == 40
        assert get(store, range(200), tenant="large") == 200
        assert store.put(range(4), _kv(store), tenant="unknown").tokens == 4  # no quota: not zero
        store.check()


@pytest.mark.parametrize("memory", ["memory://4MiB", "shm://4MiB?dir={}"])
def test_a_quota_of_memory_is_never_passed_by_many_who_put(memory: str, tmp_path: Path) -> None:
    """The only tenant's blocks are all that memory has, and are counted while threads put."""
    record, most, stop = 128 + 4 * GQA.bytes_per_token, list[int](), threading.Event()
    interval = sys.getswitchinterval()
    with open_store(memory.format(tmp_path), quotas={"small": 10 * record}) as store:

        def puts(first: int) -> None:
            while not stop.is_set():
                put(store, range(first, first + 32), tenant="small")
                first += 1000

        threads = [threading.Thread(target=puts, args=(100_000_000 * at,)) for at in range(6)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                most.append(store.stats().tiers[0].blocks or 0)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(interval)
        assert 5 <= max(most) <= 10
        store.check()


def test_a_prompt_larger_than_the_quota_never_holds_more() -> None:
    record = 128 + 4 * GQA.bytes_per_token
    with open_store("memory://4MiB", quotas={"": 3 * record}) as store:
        put(store, range(80))
        assert held(store, "") <= 3
        assert get(store, range(80), tenant="other") == 0
        store.check()


def test_a_quota_of_nothing_keeps_nothing_and_harms_nobody() -> None:
    with open_store("memory://4MiB", quotas={"none": 0}) as store:
        done = put(store, range(8), tenant="none")
        assert (done.tokens, done.dropped) == (0, 8)
        assert get(store, range(8), tenant="none") == 0
        assert put(store, range(8)).tokens == 8
        store.check()


def test_quotas_hold_on_disk_too(tmp_path: Path) -> None:
    record = 128 + 4 * GQA.bytes_per_token
    urls = ("memory://64KiB", disk(tmp_path / "d"))
    with open_store(*urls, quotas={"small": 5 * record}) as store:
        put(store, range(80), tenant="large", wait=True)
        for first in range(0, 80, 20):
            put(store, range(first, first + 20), tenant="small", wait=True)
        space = store._names.of("small").space.hex()
        assert len(list((tmp_path / "d" / space).iterdir())) <= 6, (
            "two writers may pass it, by a record"
        )
        assert get(store, range(80), tenant="large") == 80
        assert counter(store, "evictions") >= 15
        store.check()


def _kv(store: KVStore) -> Any:
    from store_kv import given

    return given(store.geometry, numbers(store.geometry, range(4), "unknown"))


# --- which model -----------------------------------------------------------------------------


def namespace(model: str | torch.nn.Module, shape: KVGeometry = GQA, **more: Any) -> Namespace:
    options = {"revision": "", "tenant": "", "lora": "", "rank": ""} | more
    return store_namespace(shape, "NHD", 4, model=model, **options)


def test_a_loaded_module_stands_for_itself() -> None:
    module = torch.nn.Linear(2, 2)
    named = namespace(module)
    assert (named.model, named.revision) == ("Linear", model_identity(module))
    module.config = SimpleNamespace(model_type="llama")  # type: ignore[assignment]
    assert namespace(module).model == "llama"
    with pytest.raises(InvalidValue, match=r"revision is 'mine' beside a loaded model"):
        namespace(module, revision="mine")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidValue, match="an adapter without the model"):
        namespace(str(tmp_path))


def test_a_store_belongs_to_one_model() -> None:
    one, two = (model_identity(torch.nn.Linear(width, 2)) for width in (2, 3))
    with KVStore(GQA, model="mine@1", tiers=["memory://1MiB"]) as store:
        store.bind(one)
        store.bind(one)
        with pytest.raises(InvalidValue, match=f"'mine' holds KV of the model {one}.*{two}"):
            store.bind(two)
        store.bind(one)
        with pytest.raises(InvalidValue, match="identity is 'mine@1'"):
            store.bind("mine@1")
    with (
        KVStore(GQA, model="mine", revision=one, tiers=["memory://1MiB"]) as store,
        pytest.raises(InvalidValue, match="its weights, configuration or adapters differ"),
    ):
        store.bind(two)


def test_a_directory_stands_for_its_weights(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    for file in TINY.iterdir():
        if file.is_file():
            (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    named = namespace(str(TINY))
    assert named.revision == model_identity(TINY)
    assert named.model == TINY.name
    assert namespace(str(tmp_path / "copy")).revision == named.revision


def test_a_directory_with_an_at_sign_in_its_path_is_a_directory(tmp_path: Path) -> None:
    """Taken for name@revision, every model below it would be one and the same, whatever changed."""
    home = tmp_path / "models@work" / "tiny"
    home.mkdir(parents=True)
    for file in TINY.iterdir():
        if file.is_file():
            (home / file.name).write_bytes(file.read_bytes())
    named = namespace(str(home))
    assert (named.model, named.revision) == ("tiny", model_identity(TINY))


def test_a_directory_is_named_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").symlink_to(TINY)
    monkeypatch.chdir(tmp_path / "tiny")
    assert namespace(".") == namespace(str(TINY))


def test_a_revision_that_is_given_wins() -> None:
    named = namespace(str(TINY), revision="mine")
    assert (named.model, named.revision) == (str(TINY), "mine")
    assert namespace("a@b", revision="c").model == "a@b"
    slashed = namespace("org/model@refs/pr/1")
    assert (slashed.model, slashed.revision) == ("org/model", "refs/pr/1")


def test_a_rank_of_several_has_to_say_which_it_is() -> None:
    with pytest.raises(InvalidValue, match=r"2 tensor-parallel ranks.*rank='tp0/2'"):
        namespace("m@1", GEOMETRIES["rank"])
    assert namespace("m@1", GEOMETRIES["rank"], rank="tp1/2").rank == "tp1/2"


# --- ids, hashed anew ------------------------------------------------------------------------


def test_ids_are_hashed_over_the_namespace_and_all_tokens_before() -> None:
    space = Namespace(tenant="a", model="m")
    names, tokens = Names.of(space, 4), np.arange(11, dtype="<i4")
    full = names.full(tokens)
    parent, want = root_key(space), []
    for at in (0, 4):
        parent = hashlib.sha256(parent + tokens[at : at + 4].tobytes()).digest()
        want.append(root_key(space)[:16] + parent)
    assert full == want
    tails = names.tails(full, tokens[8:])
    assert tails == [
        names.space + hashlib.sha256(parent + tokens[8:stop].tobytes()).digest()
        for stop in (9, 10, 11)
    ]
    assert Names.of(space, 4).tails([], tokens[:2])[1] == (
        names.space + hashlib.sha256(root_key(space) + tokens[:2].tobytes()).digest()
    )
