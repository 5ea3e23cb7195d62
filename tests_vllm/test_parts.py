"""The parts of the connector by themselves."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import process_begins
from models import make_adapter
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.integrations.vllm.content import Adapters
from kvkeep.integrations.vllm.groups import BlockReach, Group, Groups, keys_of
from kvkeep.integrations.vllm.kept import SharedStore
from kvkeep.integrations.vllm.lookups import BlockLookups
from kvkeep.integrations.vllm.messages import WorkerNews
from kvkeep.integrations.vllm.options import ConnectorOptions, RequestMistakes, RequestOptions
from kvkeep.integrations.vllm.stats import NOW, Counts, KVKeepStats
from kvkeep.store import BlockStore

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Server
    from kvkeep.store.tiers import TierStats


def test_options() -> None:
    assert ConnectorOptions.parse({}) == ConnectorOptions()
    given = {"tiers": ["memory://1MiB"], "load_timeout": 2, "tenant": "me"}
    options = ConnectorOptions.parse(given)
    assert (options.tiers, options.load_timeout, options.tenant) == (("memory://1MiB",), 2.0, "me")
    for wrong in ({"tiers": []}, {"tiers": [1]}, {"revision": 3}, {"nothing": 1},
                  {"load_timeout": -1}, {"load_timeout": True}, {"load_timeout": 1e300},
                  {"load_timeout": 10**400}, {"resets": "false"}, {"resets": 0},
                  {"resets": None}):  # fmt: skip
        with pytest.raises(InvalidValue, match=next(iter(wrong))):
            ConnectorOptions.parse(wrong)


def test_near_misses_are_named() -> None:
    with pytest.raises(InvalidValue, match=r"did you mean 'load_timeout', 'resets'\?$"):
        ConnectorOptions.parse({"reset": True, "load_timout": 1, 7: 8})
    with pytest.raises(InvalidValue, match=r"resets, public_prefixes$"):
        ConnectorOptions.parse({"colour": "blue"})
    with pytest.raises(InvalidValue, match=r"there are store, .*; did you mean 'store'\?$"):
        RequestOptions.parse({"kvkeep": {"stor": False}})


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(InvalidValue, match="a list of URLs") as refused:
        ConnectorOptions.parse({"tiers": "valkey://:secret@there"})
    assert "secret" not in str(refused.value)


def test_no_client_writes_a_line_of_its_own_into_the_log() -> None:
    with pytest.raises(InvalidValue) as refused:
        RequestOptions.parse({"kvkeep": {"a\nERROR: b": 1}})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ttl", [0, -1, "soon", True, [], float("nan"), 1e300,
                                 pytest.param(10**400, id="no float")])  # fmt: skip
def test_no_ttl_that_a_client_sends_is_more_than_wrong(ttl: object) -> None:
    for pin in (False, True):
        with pytest.raises(InvalidValue, match=r"^ttl( is |: )"):
            RequestOptions.parse({"kvkeep": {"ttl": ttl, "pin": pin}})


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (None, RequestOptions()),
        ({}, RequestOptions()),
        ({"do_remote_prefill": True}, RequestOptions()),
        ({"kvkeep": {}}, RequestOptions()),
        ({"kvkeep": {"store": False}}, RequestOptions(store=False)),
        ({"kvkeep": {"load": False, "ttl": 5}}, RequestOptions(load=False, ttl=5.0)),
        ({"kvkeep": {"pin": True}}, RequestOptions(pin=3600.0)),
        ({"kvkeep": {"pin": True, "ttl": 9}}, RequestOptions(pin=9.0)),
        ({"kvkeep": {"pin": False, "ttl": 9}}, RequestOptions(ttl=9.0)),
    ],
)
def test_request_options(params: object, wanted: RequestOptions) -> None:
    assert RequestOptions.parse(params) == wanted


def slowly(groups: Groups, there: set[bytes], hashes: list[bytes], first: int) -> int:
    """By trying every end, the longest first, token by token."""
    size = groups.block_tokens
    for end in range(len(hashes), first, -1):
        needed = []
        for at, group in enumerate(groups.groups):
            if group.state:
                blocks = {end - 1}
            elif group.window is None:
                blocks = set(range(first, end))
            else:  # the tokens that the first one behind the end sees
                seen = range(max(first * size, end * size - group.window + 1), end * size)
                blocks = {token // size for token in seen}
            needed += [keys_of([hashes[block]], at)[0] for block in blocks]
        if there.issuperset(needed):
            return end
    return first


STATE = "state"


@pytest.mark.parametrize(
    "kinds",
    [
        (None,),
        (None, 40),
        (None, 40, 100),
        (None, None, 17),
        (STATE, None),
        (STATE, STATE, None),
        (None, 40, STATE),
        (STATE,),
        (STATE, STATE),
    ],
)
@pytest.mark.parametrize("stored", [0.3, 0.85])
def test_how_far_a_prompt_reaches(kinds: tuple[int | str | None, ...], stored: float) -> None:
    rng = random.Random(str(kinds))
    groups = Groups(
        tuple(
            Group((f"l{kind}",), state=True) if kind == STATE else Group((f"l{kind}",), kind)  # type: ignore[arg-type]
            for kind in kinds
        ),
        16,
        drops_last=False,
    )
    reached = set()
    for _ in range(400):
        hashes = [rng.randbytes(32) for _ in range(rng.randrange(1, 14))]
        there = set()
        for at, kind in enumerate(kinds):
            often = stored if kind == STATE else 0.9
            there.update(key for key in keys_of(hashes, at) if rng.random() < often)
        first = rng.randrange(len(hashes))

        def count(asked: list[bytes], there: set[bytes] = there) -> int:
            return next((at for at, key in enumerate(asked) if key not in there), len(asked))

        end, covered = groups.reach(hashes, first, count)
        assert end == slowly(groups, there, hashes, first)
        whole = Groups(tuple(g for g in groups.groups if not g.state), 16, drops_last=False)
        if None in kinds and len(whole.groups) == len(kinds) - kinds.count(STATE):
            keys = [keys_of(hashes, at) for at, kind in enumerate(kinds) if kind is None]
            assert covered == first + min(count(group[first:]) for group in keys)
        reached.add(end - first)
    assert len(reached) > 3


def test_ranks_agree_on_one_end() -> None:
    """Where one rank ends another may have no state: all are asked again."""
    hashes = [os.urandom(32) for _ in range(9)]
    states = [{2, 5, 8}, {2, 6}]  # ends at which each of two ranks has a state

    class Followed:
        lookup = None

        class request:
            request_id = "one"

        @staticmethod
        def hashes(first: int, end: int) -> list[bytes]:
            return hashes[first:end]

    groups = Groups((Group(("s",), state=True), Group(("f",))), 16, drops_last=False)
    lookups = BlockLookups(groups, None, Counts(), ranks=2)
    followed: Any = Followed()
    rounds = 0
    while (reach := lookups.reach(followed, 0, 9)) is None:
        rounds += 1
        for asked in lookups.take_messages():
            limit = len(asked.hashes)
            for there in states:
                end = max((at for at in there if at <= limit), default=0)
                lookups.receive(WorkerNews({asked.number: [BlockReach(end, limit)]}))
    assert reach == BlockReach(2, 9)
    assert rounds == 4  # up to 9, 6, 5, 2
    lookups.close()


def test_states_that_cannot_be_kept() -> None:
    """The message says what to change."""
    spec = MambaSpec(block_size=64, shapes=((2, 8),), dtypes=(torch.float32,))
    for changed, said in (
        ({}, "--enable-prefix-caching"),
        ({"mamba_cache_mode": "align", "num_speculative_blocks": 2}, "--speculative-config"),
    ):
        group = KVCacheGroupSpec(["conv"], dataclasses.replace(spec, **changed))  # type: ignore[arg-type]
        config: Any = SimpleNamespace(kv_cache_groups=[group], hash_block_size=64)
        with pytest.raises(UnsupportedModel, match=f"layer conv.*{said}"):
            Groups.of(None, config)  # type: ignore[arg-type]


def test_a_draft_layer_needs_the_next_block() -> None:
    groups = Groups((Group(("l",), None),), 16, drops_last=True)
    hashes = [os.urandom(32) for _ in range(4)]
    assert groups.reach(hashes, 0, len).end == 3
    assert groups.reach(hashes, 0, lambda _: 0).end == 0
    assert groups.reach(hashes, 3, lambda _: 1).end == 3


def test_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvkeep")  # an engine before may have given it vLLM's
    adapters = Adapters()
    one = LoRARequest("one", 1, make_adapter(tmp_path / "one", 1))
    two = LoRARequest("two", 2, make_adapter(tmp_path / "two", 2))
    process_begins()
    first, second = adapters.digest(one), adapters.digest(two)
    assert first is not None
    assert second is not None
    assert first != second
    assert adapters.digest(one) == first
    assert Adapters().digest(one) == first
    config = tmp_path / "two" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 8}))
    assert Adapters().digest(two) not in (None, second)
    assert adapters.digest(two) is None
    assert "changed while vLLM" in caplog.text
    assert Adapters().digest(LoRARequest("far", 3, "somebody/on-the-hub")) is None
    assert Adapters().digest(LoRARequest("one", 4, one.lora_path, load_inplace=True)) is None
    mixed = Adapters.mixed([bytes(32), bytes(31) + b"1"], first)
    assert len({*mixed}) == 2


def test_counts_add_up() -> None:
    counts = Counts()
    assert counts.take() is None
    threads = [threading.Thread(target=counts.add, kwargs={"a": 1, "b": 0.5}) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.add(**{"hits memory": 3})
    counts.set(f"{NOW}blocks 0 memory", 7)
    taken = counts.take()
    assert taken is not None
    state = {f"{NOW}blocks 0 memory": 7}
    assert taken.data == {"a": 20, "b": 10, "hits memory": 3, **state}
    both = taken.aggregate(KVKeepStats(data={"a": 1, "c": 2, f"{NOW}blocks 0 memory": 5}))
    assert both.data == {"a": 21, "b": 10, "c": 2, "hits memory": 3, f"{NOW}blocks 0 memory": 5}
    assert "blocks" not in str(both.reduce())
    assert counts.take() is None


def test_a_reset_says_whether_every_tier_was_reset(server: Server) -> None:
    groups = Groups((Group(("l",), None),), 16, drops_last=False)
    with BlockStore("reset", tiers=["memory://1MiB", server.url(timeout="5s")]) as store:
        shared = SharedStore("reset", store, groups, [8])
        key = os.urandom(32)
        assert store.put([key], [b"12345678"], wait=10) == 1
        assert store.flush(10)
        assert shared.clear()
        assert store.lookup([key]) == 0
        store.put([key], [b"12345678"], wait=10)
        assert store.flush(10)
        server.hang()
        assert not shared.clear()
        server.go_on()
        shared.close()


def test_a_block_that_is_stored_anew_outlives_an_earlier_ttl() -> None:
    groups = Groups((Group(("l",), None),), 16, drops_last=False)
    with BlockStore("ttl", tiers=["memory://1MiB"]) as store:
        shared, gone, anew = SharedStore("ttl", store, groups, [8]), os.urandom(32), os.urandom(32)
        store.put([gone, anew], [b"12345678"] * 2)
        shared.expire([gone, anew], 0)
        shared.expire([anew], None)
        shared.delete_expired()
        until = time.monotonic() + 60
        while store.lookup([gone]):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert store.lookup([anew]) == 1
        shared.close()


class SlowToSay(BlockStore):
    """Its first word on its tiers comes when another thread has heard the second, or would have."""

    def __init__(self) -> None:
        super().__init__("hits", tiers=["memory://1MiB"])
        self.key = os.urandom(32)
        self.put([self.key], [b"x"])
        self.asked = threading.Event()
        self.heard = threading.Event()

    def stats(self) -> list[TierStats]:
        said = super().stats()
        if not self.asked.is_set():
            self.asked.set()
            self.heard.wait(0.2)
        return said


def test_hits_are_counted_once_and_never_back() -> None:
    groups = Groups((Group(("l",), None),), 16, drops_last=False)
    with SlowToSay() as store:
        shared, first, second = SharedStore("hits", store, groups, [1]), Counts(), Counts()
        store.get([store.key], [memoryview(bytearray(1))])
        other = threading.Thread(target=shared.count_tiers, args=[first])
        other.start()
        store.asked.wait()
        store.get([store.key], [memoryview(bytearray(1))])
        shared.count_tiers(second)
        store.heard.set()
        other.join()
        counted = [taken.data for counts in (first, second) if (taken := counts.take())]
        assert [one["hits memory"] for one in counted] == [1, 1]
        shared.close()


def test_a_request_with_many_unknown_options_names_a_few() -> None:
    """A client may send a million names, and they are read in the scheduler's thread."""
    given = {"kvkeep": {f"store{number}": True for number in range(200_000)}}
    with pytest.raises(InvalidValue, match="and others; there are store, load") as told:
        RequestOptions.parse(given)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("name", [None, "store", "ttl", "pin"])
def test_params_that_are_too_deep_to_be_written_are_ignored(name: str | None) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    counts = Counts()
    params = {"kvkeep": deep if name is None else {name: deep}}
    assert RequestMistakes(counts).options("deep", params) == RequestOptions()
    taken = counts.take()
    assert taken is not None
    assert taken.data == {"ignored_params": 1}
