"""`PrefixRouter`: what it makes of events, and where it sends prompts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.cost import PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.serve.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, salt_digest
from kvkeep.serve.router import HeldPrefix, PrefixRouter, RoutingCost, Text

PROMPT = list(range(64))


def stored(hashes, tokens, parent=None, *, size=16, medium="GPU", **more) -> BlockStored:
    fields = {"lora_id": None, "lora_name": None, **more}
    return BlockStored(hashes, parent, tokens, size, medium=medium, **fields)


def matched(router: PrefixRouter, tokens=PROMPT, **of) -> dict[tuple[str, int], int]:
    return {
        (score.place.instance, score.place.rank): score.tokens
        for score in router.score(tokens, **of)
        if score.tokens
    }


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def router(now) -> PrefixRouter:
    return PrefixRouter(["a", "b"], clock=lambda: now[0])


def test_the_longest_prefix_wins(router):
    router.apply("a", [stored([1], PROMPT[:16])])
    router.apply("b", [stored([1, 2], PROMPT[:32])])
    best, other = router.score(PROMPT)
    assert (best.place.instance, best.tokens, best.tiers) == ("b", 32, {"GPU": 32})
    assert (other.place.instance, other.tokens) == ("a", 16)
    assert best.seconds < other.seconds
    router.apply("b", [BlockRemoved([2], "GPU"), BlockRemoved([1], "GPU")])
    assert router.score(PROMPT)[0].place.instance == "a"
    router.apply("a", [AllBlocksCleared()])
    assert matched(router) == {}
    router.check()


def test_medium_none_is_the_gpu_and_a_slower_tier_costs_more(router):
    router.apply("a", [stored([1, 2, 3, 4], PROMPT, medium="CPU")])
    router.apply("b", [stored([1, 2, 3], PROMPT[:48], medium=None)])
    scores = {score.place.instance: score for score in router.score([*PROMPT, 1])}
    assert scores["a"].tiers == {"CPU": 64}
    assert scores["b"].tiers == {"GPU": 48}
    free, dear = (TransferCost(seconds_per_byte=one) for one in (0.0, 1.0))
    quick = PrefixRouter(["a", "b"], cost=RoutingCost(tiers={"GPU": free, "CPU": free}))
    slow = PrefixRouter(["a", "b"], cost=RoutingCost(tiers={"GPU": free, "CPU": dear}))
    for one, best in ((quick, "a"), (slow, "b")):
        one.apply("a", [stored([1, 2, 3, 4], PROMPT, medium="CPU")])
        one.apply("b", [stored([1, 2, 3], PROMPT[:48])])
        assert one.score([*PROMPT, 1])[0].place.instance == best


def test_ranks_are_places_of_their_own(router):
    router.apply("a", [stored([1], PROMPT[:16])], rank=1)
    router.apply("a", [stored([1, 2], PROMPT[:32])], rank=0)
    assert matched(router) == {("a", 0): 32, ("a", 1): 16}
    assert router.num_ranks("a") == 2
    router.clear("a", 0)
    assert matched(router) == {("a", 1): 16}
    router.clear("a")
    assert matched(router) == {}


def test_a_rank_that_is_not_there_gets_no_prompt():
    one = PrefixRouter(["a", "b"], ranks=2)
    for rank in (1, 2, -1, 2**63):
        one.apply("a", [stored([1], PROMPT[:16])], rank=rank)
    assert one.num_ranks("a") == 2
    assert matched(one) == {("a", 0): 16, ("a", 1): 16}
    one.clear("a", 7)
    assert matched(one) == {("a", 1): 16}
    one.check()
    with pytest.raises(InvalidValue):
        PrefixRouter(["a"], ranks=0)


def test_salts_from_vllm_and_from_us_are_found_by_the_salt_itself(router):
    router.apply("a", [stored([1, 2], PROMPT[:32], extra_keys=[["T"], None])])
    router.apply("b", [stored([1, 2], PROMPT[:32], extra_keys=[[salt_digest("T")], None])])
    assert matched(router, salt="T") == {("a", 0): 32, ("b", 0): 32}
    assert matched(router) == matched(router, salt="t") == {}


def test_adapters_and_images(router):
    router.apply("a", [stored([1, 2], PROMPT[:32], lora_name="L", extra_keys=[["L"], ["L"]])])
    image = [None, [["picture", 3]]]
    router.apply("b", [stored([1, 2], PROMPT[:32], extra_keys=image)])
    assert matched(router, lora="L") == {("a", 0): 32}
    assert matched(router) == {("b", 0): 16}
    assert router.is_adapter("L")
    assert not router.is_adapter("M")


def test_a_window_says_nothing_of_a_prefix(router):
    window = stored([1, 2], PROMPT[:32], group_idx=1, kv_cache_spec_kind="sliding_window")
    whole = stored([1, 2], PROMPT[:32], group_idx=0, kv_cache_spec_kind="full_attention")
    router.apply("a", [window])
    assert matched(router) == {}
    router.apply("a", [whole, BlockRemoved([1], "GPU", 1)])
    assert matched(router) == {("a", 0): 32}
    router.apply("a", [BlockRemoved([1], "GPU", 0)])
    assert matched(router) == {}
    assert router.stats().skipped == 1


def test_what_waits_counts(router):
    router.apply("a", [stored([1], PROMPT[:16])])
    busy = router.begin(router.score(list(range(1000, 30_000)), among=["a"])[0])
    assert router.load("a")[0] == 1
    assert router.load("a")[1] > 1
    assert router.score(PROMPT)[0].place.instance == "b"
    router.first_token(busy)
    assert router.load("a") == (1, 0.0)
    router.end(busy)
    router.end(busy)
    assert router.load("a") == (0, 0.0)


def test_what_had_much_of_late_is_spared_for_a_while(router, now):
    router.apply("a", [stored([1], PROMPT[:16])])
    for computed in (False, True):  # a request that is refused is no work
        for _ in range(3):
            ticket = router.begin(router.score(list(range(1000, 60_000)), among=["a"])[0])
            if computed:
                router.first_token(ticket)
            router.end(ticket)
        assert router.score(PROMPT)[0].place.instance == ("b" if computed else "a")
    now[0] = 1000.0
    assert router.score(PROMPT)[0].place.instance == "a"


def test_work_is_spread_where_nothing_is_known():
    router = PrefixRouter([f"i{number}" for number in range(7)])
    counts: dict[str, int] = {}
    for number in range(700):
        best = router.score(np.arange(number * 600, number * 600 + 512, dtype=np.int32))[0]
        ticket = router.begin(best)
        router.first_token(ticket)
        router.end(ticket)
        counts[best.place.instance] = counts.get(best.place.instance, 0) + 1
    assert len(counts) == 7
    assert max(counts.values()) <= 110


def test_what_is_being_computed_counts_as_there(router):
    prompt = list(range(600))
    first = router.score(prompt)[0]
    ticket = router.begin(first, prompt)
    (twin,) = router.score(prompt, among=[first.place.instance])
    assert twin.tiers == {"COMING": 576}
    assert twin.prefill_s < first.prefill_s
    both = router.begin(twin, prompt)
    router.end(ticket)
    assert matched(router, prompt) == {(first.place.instance, 0): 576}
    router.end(both)
    assert matched(router, prompt) == {}
    router.check()


def test_what_was_answered_counts_as_there_until_events_decide(router):
    prompt = list(range(600))
    for answered in (False, True):
        ticket = router.begin(router.score(prompt, among=["a"])[0], prompt)
        if answered:
            router.first_token(ticket)
        router.end(ticket)
        assert matched(router, prompt) == ({("a", 0): 576} if answered else {})
    (there,) = router.score([*prompt, 1, 2], among=["a"])
    assert there.tiers == {"ROUTED": 576}
    router.apply("b", [stored([1], PROMPT[:16])])
    assert matched(router, prompt) == {("a", 0): 576, ("b", 0): 16}
    router.apply("a", [stored([1, 2], PROMPT[:32])])
    assert matched(router, prompt) == {("a", 0): 32, ("b", 0): 16}
    ticket = router.begin(there, prompt)
    router.first_token(ticket)
    assert matched(router, prompt) == {("a", 0): 32, ("b", 0): 16}
    router.end(ticket)
    router.remove("a")
    router.check()


@given(
    st.builds(
        lambda text, length: (text * 600)[:length].encode(),
        st.text(st.characters(max_codepoint=127), min_size=1, max_size=9),
        st.integers(0, 600),
    ),
    st.integers(0, 300),
    st.booleans(),
)
def test_a_text_is_found_by_its_beginning(text, more, announced):
    """In pieces of 256 bytes, apart from tokens, salts and models; events do not end it."""
    router = PrefixRouter(["a", "b"])
    if announced:
        router.apply("a", [stored([1], PROMPT[:16])])
    ticket = router.begin(router.score(Text(text), among=["a"])[0], Text(text), lora="m", salt="s")
    router.first_token(ticket)
    router.end(ticket)
    longer = Text(text + b"x" * more)
    full = len(text) // 256 * 64
    assert matched(router, longer, lora="m", salt="s") == ({("a", 0): full} if full else {})
    for other in ({}, {"lora": "m"}, {"salt": "s"}, {"lora": "m", "salt": "t"}):
        assert matched(router, longer, **other) == {}
    assert matched(router, longer.symbols, lora="m", salt="s") == {}
    chosen = router.choose(longer, lora="m", salt="s")
    assert chosen.tokens == full
    assert chosen.place.instance == "a" or not full
    assert router.blocks("a")[0] == announced
    router.clear("a")
    assert matched(router, longer, lora="m", salt="s") == {}
    router.check()


def test_what_was_routed_is_bounded():
    router = PrefixRouter(["a"], most_blocks=100)
    for number in range(50):
        prompt = list(range(number * 1000, number * 1000 + 640))
        ticket = router.begin(router.score(prompt)[0], prompt)
        router.first_token(ticket)
        router.end(ticket)
        assert matched(router, prompt) == {("a", 0): 640}
        router.check()
    assert router.blocks("a")[0] == 0
    assert 0 < router.routed("a") <= 100


def test_expectations_survive_the_clearing_of_their_place(router):
    prompt = list(range(600))
    ticket = router.begin(router.score(prompt)[0], prompt)
    router.clear(ticket.place.instance)
    router.end(ticket)
    assert matched(router, prompt) == {}
    router.check()


def test_instances_come_and_go(router):
    router.add("c")
    router.apply("c", [stored([1, 2], PROMPT[:32])])
    ticket = router.begin(router.score(PROMPT)[0], PROMPT)
    assert ticket.place.instance == "c"
    router.remove("c")
    router.end(ticket)
    assert {score.place.instance for score in router.score(PROMPT)} == {"a", "b"}
    with pytest.raises(InvalidValue, match="unknown instance 'c'"):
        router.apply("c", [AllBlocksCleared()])
    with pytest.raises(InvalidValue, match="not known"):
        router.begin(router.score(PROMPT)[0]._replace(place=ticket.place))
    assert router.stats().instances == 2


def test_what_comes_and_goes_leaves_no_load_behind(router):
    """In whatever order prompts arrive, the sums come back to nothing."""
    rng = np.random.default_rng(2)
    going = [router.begin(router.score(rng.integers(0, 99, size))[0]) for size in range(1, 200)]
    for number in rng.permutation(len(going)):
        router.first_token(going[number])
        router.end(going[number])
    assert router.load("a") == router.load("b") == (0, 0.0)


def test_a_request_that_an_instance_had_before_it_came_again_is_not_its_load(router):
    ticket = router.begin(next(s for s in router.score(PROMPT) if s.place.instance == "a"), PROMPT)
    router.remove("a")
    router.add("a")
    router.end(ticket)
    assert router.load("a") == (0, 0.0)


def test_events_and_prompts_at_once(router):
    """Threads that tell and threads that ask; what is known in the end is what was told last."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 99, 640).tolist() for _ in range(8)]
    ended = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not ended.is_set():
                for prompt in prompts:
                    ticket = router.begin(router.score(prompt)[0], prompt)
                    router.first_token(ticket)
                    router.end(ticket)
        except BaseException as failure:  # noqa: BLE001 - shown below
            failures.append(failure)

    def tell(instance: str) -> None:
        try:
            for turn in range(60):
                prompt = prompts[turn % 8]
                hashes = list(range(turn * 40, turn * 40 + 40))
                router.apply(instance, [stored(hashes, prompt)])
                router.apply(instance, [BlockRemoved([one], "GPU") for one in reversed(hashes)])
            router.apply(instance, [stored([1], prompts[0][:16])])
        except BaseException as failure:  # noqa: BLE001 - shown below
            failures.append(failure)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    telling = [threading.Thread(target=tell, args=(name,)) for name in ("a", "b")]
    for thread in [*asking, *telling]:
        thread.start()
    for thread in telling:
        thread.join()
    ended.set()
    for thread in asking:
        thread.join()
    assert failures == []
    assert matched(router, prompts[0]) == {("a", 0): 16, ("b", 0): 16}
    assert router.load("a") == router.load("b") == (0, 0.0)
    router.check()


# --- costs -----------------------------------------------------------------------------------


@given(st.integers(1, 100_000), st.integers(0, 100_000), st.integers(0, 100_000))
def test_more_cached_never_costs_more(tokens, one, other):
    cost = RoutingCost()
    less, more = sorted((one, other))
    assert cost.prefill_s(tokens, HeldPrefix(more, {"GPU": more})) <= cost.prefill_s(
        tokens, HeldPrefix(less, {"GPU": less})
    ) * (1 + 1e-9)
    assert cost.prefill_s(tokens, HeldPrefix(more, {"GPU": more})) > 0


def test_seconds_add_up():
    prefill = PrefillCost(
        seconds_per_token=0.5, seconds_per_token_pair=0.5, kv_bytes_per_token=100.0
    )
    free, slow = TransferCost(seconds_per_byte=0), TransferCost(seconds_per_byte=0.00125)
    cost = RoutingCost(prefill=prefill, tiers={"GPU": free, "CPU": slow})
    assert cost.prefill_s(10, None) == 0.5 * 10 + 0.25 * 100
    held = HeldPrefix(6, {"GPU": 4, "CPU": 2})
    assert cost.prefill_s(10, held) == 2 * 0.125 + 0.5 * 4 + 0.25 * (100 - 36)
    assert cost.prefill_s(6, held) == 0.125 + 0.5 + 0.25 * (36 - 25)  # the last is computed
    # What is slower to load than to compute is computed, and the rest is loaded.
    slower = RoutingCost(
        prefill=prefill, tiers={"GPU": free, "CPU": TransferCost(seconds_per_byte=1.0)}
    )
    assert slower.prefill_s(10, held) == 0.5 * 6 + 0.25 * (100 - 16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": PrefillCost(seconds_per_token=0)},
        {"balance": float("nan")},
        {"memory_s": 0},
        {"running_s": -1},
    ],
)
def test_costs_that_are_none(wrong):
    with pytest.raises(InvalidValue):
        RoutingCost(**wrong)
