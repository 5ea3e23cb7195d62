"""A store by a name: one for all who ask for the same, refused to all others."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from store_kv import GQA, disk, get, put

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import KVStore
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.kv.options import StoreOptions
from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = range(16)


def opened(name: str, path: Path, geometry: KVGeometry = GQA, **more: Any) -> KVStore:
    options: dict[str, Any] = {
        "model": "tiny@1", "tiers": ["memory://1MiB", disk(path / "d")], "block_tokens": 4,
    }  # fmt: skip
    return KVStore.shared(name, geometry, **(options | more))


def test_all_who_ask_for_a_name_have_the_same_store(tmp_path: Path) -> None:
    first, second = opened("a", tmp_path), opened("a", tmp_path, policy=Inclusive())
    with opened("b", tmp_path) as another:
        assert another._tiered is not first._tiered
    put(first, TOKENS)
    assert second.stats().puts == 1
    assert get(second, TOKENS) == 16
    assert isinstance(second, KVStore)
    second.close()


def test_it_belongs_to_the_first_model_that_any_user_brings(tmp_path: Path) -> None:
    first, second = "loaded-" + "1" * 40, "loaded-" + "2" * 40
    with opened("bound", tmp_path) as one, opened("bound", tmp_path) as another:
        one.bind(first)
        another.bind(first)
        with pytest.raises(InvalidValue, match="holds KV of the model loaded-1"):
            another.bind(second)
    with opened("bound", tmp_path) as again:
        again.bind(second)


def test_a_module_names_a_store_that_is_shared(tmp_path: Path) -> None:
    model, another = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with opened("module", tmp_path, model=model) as one, opened("module", tmp_path, model=model):
        assert one.namespace.revision.startswith("loaded-")
        with pytest.raises(InvalidValue, match=r"namespace\.revision"):
            opened("module", tmp_path, model=another)


def test_options_are_typed_as_those_of_the_constructor() -> None:
    """Type checkers accept what runs, and nothing else."""
    options = {
        name: annotation.__forward_arg__
        for name, annotation in StoreOptions.__annotations__.items()
    }
    taken = {
        one.name: one.annotation if one.default is not one.empty else f"Required[{one.annotation}]"
        for one in inspect.signature(KVStore).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    }
    assert options == taken


def test_the_last_one_closes_it(tmp_path: Path) -> None:
    stores = [opened("last", tmp_path) for _ in range(3)]
    tiered = stores[0]._tiered
    put(stores[0], TOKENS)
    for store in stores[:2]:
        assert store.close()
        assert store.close(), "a second close takes nobody else's share"
        with pytest.raises(IllegalStep, match="closed"):
            store.get(TOKENS)
        assert store.stats().puts == 1
        assert not tiered._closed
    assert get(stores[2], TOKENS) == 16
    assert stores[2].close()
    assert tiered._closed
    with opened("last", tmp_path, block_tokens=8) as again:
        assert again._tiered is not tiered, "a new one, of any configuration"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "tiny@2"}, "namespace.revision='1', and '2'"),
        ({"model": "other@1"}, "namespace.model='tiny', and 'other'"),
        ({"tenant": "x"}, "namespace.tenant"),
        ({"lora": "x"}, "namespace.lora"),
        ({"block_tokens": 8}, "block_tokens=4, and 8"),
        ({"layout": "HND"}, "layout='NHD', and 'HND'"),
        ({"geometry": KVGeometry(3, 2, 8, "bfloat16")}, "geometry.layers=2, and 3"),
        ({"policy": Exclusive()}, r"policy='Inclusive\(admit_after=1\)'"),
        ({"quotas": {"a": "1MiB"}}, "quotas={}"),
        ({"tiers": ["memory://2MiB"]}, r"tiers=\(memory://1MiB, file"),
        ({"tiers": ["memory://1MiB", "valkey://u:secret@127.0.0.1:1"]}, r"tiers\[1\]=file"),
        ({"tiers": ["memory://1MiB", MemoryBackend(1 << 20)]}, r"tiers\[1\]=file"),
    ],
)
def test_another_configuration_is_refused_by_its_field(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with opened("refused", tmp_path) as store:
        with pytest.raises(InvalidValue, match=said) as refused:
            opened("refused", tmp_path, **more)
        assert "secret" not in str(refused.value)
        put(store, TOKENS)
        assert get(store, TOKENS) == 16


def test_options_of_a_tier_differ_without_being_shown(tmp_path: Path) -> None:
    with opened("options", tmp_path) as store:
        tiers = ["memory://1MiB", disk(tmp_path / "d", size="1GiB")]
        with pytest.raises(InvalidValue, match=r"tiers\[1\]=.* and the same with other"):
            opened("options", tmp_path, tiers=tiers)
        assert store.lookup(TOKENS).tokens == 0


def test_what_cannot_be_opened_leaves_no_name_behind(tmp_path: Path) -> None:
    for wrong in ({"tiers": ["tape://1"]}, {"model": "no revision"}):
        with pytest.raises(InvalidValue):
            opened("wrong", tmp_path, **wrong)
    for name in ("", 5):
        with pytest.raises(InvalidValue, match="name of a shared store"):
            opened(name, tmp_path)  # type: ignore[arg-type]
    with opened("wrong", tmp_path) as store:
        assert store.lookup(TOKENS).tokens == 0


def test_many_threads_open_and_close_one_name(tmp_path: Path) -> None:
    faults: list[BaseException] = []
    seen = set()

    def work() -> None:
        try:
            for _ in range(10):
                store = opened("busy", tmp_path)
                seen.add(id(store._tiered))
                put(store, TOKENS)
                assert get(store, TOKENS) == 16
                assert store.close()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults, faults
    assert seen


def test_what_the_constructor_refuses_is_refused_of_an_open_name(tmp_path: Path) -> None:
    with opened("checked", tmp_path):
        with pytest.raises(TypeError, match="'bloc_tokens'"):
            opened("checked", tmp_path, bloc_tokens=7)
        with pytest.raises(InvalidValue, match="list of URLs"):
            opened("checked", tmp_path, tiers="memory://1MiB")
