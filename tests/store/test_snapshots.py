"""Snapshots in a store: what is found, read, refused and lost, in every geometry."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from snapshot_kv import GEOMETRIES, HEADS, SIZE, STATE, get, open_snapshots, same, snapshot
from store_kv import counter, disk, quiet, records

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup
from kvkeep.store import KVStore, Put, Snapshot
from kvkeep.store.codecs import BlockShape, Damaged, generate_key, make_codec
from kvkeep.store.tiers import Inclusive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = list(range(100, 150))


def put(store: KVStore, n: int, start: int = 0, more: int = 0, **how: Any) -> Put:
    return store.put_snapshot(TEXT, snapshot(store, TEXT[:n], start, more), **how)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_longest_position_outlives_the_process(name: str, layout: str, tmp_path: Path) -> None:
    tiers = "memory://4MiB", disk(tmp_path)
    with open_snapshots(name, *tiers, layout=layout) as store:
        for n in (8, 13, 23, 37):
            done = put(store, n)
            assert (done.dropped, done.tokens + done.skipped) == (0, n)
        assert put(store, 37) == Put(0, 37, 0, 0)
    with open_snapshots(name, *tiers, layout=layout) as store:
        for length in (8, 12, 13, 22, 23, 24, 36, 37, 50):
            want = max(n for n in (8, 13, 23, 37) if n <= length)
            # The end of a block may be a position, too, where no layer has a state.
            assert want <= get(store, TEXT[:length]) <= length
            if any(group.state for group in GEOMETRIES[name].groups):
                assert get(store, TEXT, limit=length) == want
        assert get(store, TEXT[:13] + [7] * 20) == 13, "another prompt branches off"
        assert get(store, TEXT, 36) == 37
        assert get(store, TEXT, 37) == 0


def test_each_record_is_read_once(tmp_path: Path) -> None:
    tiers = "memory://4MiB", disk(tmp_path)
    with open_snapshots("all", *tiers) as store:
        put(store, 37, wait=True)
    with open_snapshots("all", *tiers) as store:
        blocks = store.stats().tiers[1].blocks
        assert get(store, TEXT) == 37
        # 10 base records; [28, 37) of the window and [32, 37) of the chunk; the state
        assert blocks == 10 + 3 + 2 + 1
        assert counter(store, "hits") == blocks
        assert counter(store, "misses") == 0


def test_lookup_tells_how_far_the_kv_alone_is_there() -> None:
    with open_snapshots("state") as store:
        put(store, 8)
        put(store, 40)
        store.remove(TEXT, 33)
        found = store.lookup(TEXT)
        assert (found.tokens, found.stored_tokens) == (8, 32)
        miss, *rest = store.why(TEXT, found.tokens)
        assert (miss.start, miss.stop, miss.what, miss.detail) == (8, 32, "never", "state")
        assert rest[0].what == "removed"
        assert rest[-1].stop == len(TEXT)
        assert int(found) == 8


def test_why_covers_a_tail_whose_state_is_gone() -> None:
    with open_snapshots("state", "memory://4MiB") as store:
        for n in (8, 11):
            put(store, n)
        names = store._prompt(TEXT, 0, None, None)
        store._tiered.remove([names.state(11)])
        assert store.lookup(TEXT[:11]).tokens == 8
        (miss,) = store.why(TEXT[:11], 8)
        assert (miss.start, miss.stop, miss.what) == (8, 11, "removed")
        store._tiered.remove([names.state(8)])
        found = store.why(TEXT, 0)
        assert [(one.start, one.stop, one.what) for one in found] == [
            (0, 11, "removed"),
            (11, len(TEXT), "never"),
        ]


def test_windows_need_no_more_than_their_span() -> None:
    """A caller whose window has dropped the rest gives the last tokens only."""
    with open_snapshots("windows") as store:
        assert [store.window_start(layer, 23) for layer in range(4)] == [0, 18, 20, 18]
        assert store.window_start(2, 25) == 25
        put(store, 23)
        put(store, 24)
        assert get(store, TEXT) == 24
        assert get(store, TEXT[:23]) == 23
        assert get(store, TEXT[:22]) == 0, "of position 20, the window was never given"
        put(store, 24, more=24)
        assert get(store, TEXT[:22]) == 20
        assert get(store, TEXT[:19]) == 16


def test_a_snapshot_may_begin_where_the_last_one_ended() -> None:
    with open_snapshots("all") as store:
        put(store, 24)
        assert put(store, 39, start=24) == Put(15, 0, 0, 0)
        assert get(store, TEXT) == 39
        assert put(store, 50, start=45) == Put(0, 0, 5, 0), "39 … 45 are nowhere"
        assert get(store, TEXT) == 39
        assert store.why(TEXT, 39)[0].what == "dropped"


@pytest.mark.parametrize("name", ["state", "windows", "all"])
def test_the_snapshots_of_a_request_are_one_touch(name: str, tmp_path: Path) -> None:
    policy = Inclusive(admit_after=2)
    with open_snapshots(name, "memory://4MiB", disk(tmp_path), policy=policy) as store:
        for start, stop in ((0, 12), (12, 16), (16, 21)):
            put(store, stop, start, wait=True)
        assert store.stats().tiers[1].blocks == 0, "no prompt was repeated"
        assert get(store, TEXT) == 21
        assert store.flush(10)
        assert store.stats().tiers[1].blocks


@pytest.mark.parametrize("how", ["damaged", "missing"])
@pytest.mark.parametrize("group", ["base", "window 0", "window 1", "state"])
def test_a_bad_record_of_any_group_is_a_shorter_hit(how: str, group: str, tmp_path: Path) -> None:
    tiers = "memory://4MiB", disk(tmp_path)
    with open_snapshots("all", *tiers) as store:
        put(store, 20)
        put(store, 36)
        names = store._names.of(None)
        key = names.full(np.array(TEXT, np.int32))[8][16:]
        if group != "base":
            key = hashlib.sha256(f"kvkeep record 1\n{group}\n".encode() + key).digest()
    (file,) = (file for file in records(tmp_path) if file.name == key.hex())
    if how == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with open_snapshots("all", *tiers) as store:
        assert get(store, TEXT) == 20
        assert counter(store, "damaged") == (how == "damaged")
        assert get(store, TEXT) == 20
        put(store, 36)
        assert get(store, TEXT) == 36


def test_a_tier_that_is_late_is_a_miss(tmp_path: Path) -> None:
    tiers = "memory://4MiB", disk(tmp_path)
    with open_snapshots("all", *tiers) as store:
        put(store, 36)
    with open_snapshots("all", *tiers) as store:
        assert get(store, TEXT, deadline=0.0) in (0, 36)
        assert get(store, TEXT, deadline=60.0) == 36


@pytest.mark.parametrize("codec", ["lossless", "int8", "fp8"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_lossy_codec_keeps_states_exact(codec: str, sealed: bool, tmp_path: Path) -> None:
    options = {"codec": codec}
    if sealed:
        key = tmp_path / "key"
        generate_key(key)
        options["encrypt"] = str(key)
    tiers = "memory://4MiB", disk(tmp_path / "d", **options)
    shape = KVGeometry.of(
        [
            LayerGroup("full", (0,), replace(HEADS, head_dim=64, value_dim=64)),
            LayerGroup("window", (1,), replace(HEADS, head_dim=32, value_dim=32), 40),
            LayerGroup("state", (2,), state=STATE),
        ],
        dtype="bfloat16",
    )
    random = torch.Generator().manual_seed(1)

    def kv(tokens: int, width: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(tokens, 2, width, generator=random).bfloat16() for _ in range(2))

    state = {
        (2, "conv"): torch.randn(3, 2, generator=random).bfloat16(),
        (2, "recurrent"): torch.randn(2, 3, generator=random),
    }
    given = Snapshot(50, 0, {0: kv(50, 64), 1: kv(39, 32)}, state)
    with KVStore(shape, model="tiny@1", block_tokens=32, tiers=tiers) as store:
        store.put_snapshot(TEXT, given)
    with KVStore(shape, model="tiny@1", block_tokens=32, tiers=tiers) as store:
        found = store.get_snapshot(TEXT)
        assert found is not None
        assert found.tokens == 50
        assert all(torch.equal(found.state[key], state[key]) for key in state)
        for layer, parts in given.layers.items():
            for want, part in zip(parts, found.layers[layer], strict=True):
                error = (want.float() - part.float()).abs().max()
                assert error == 0 if codec == "lossless" else 0 < error < 0.2
        assert counter(store, "damaged") == 0


def test_states_can_be_changed_by_who_gets_them() -> None:
    with open_snapshots("state") as store:
        put(store, 8)
        found = store.get_snapshot(TEXT)
        assert found is not None
        for tensor in found.state.values():
            tensor.add_(1)
        for parts in found.layers.values():
            for part in parts:
                part.zero_()
        assert get(store, TEXT) == 8


def test_what_is_kept_is_part_of_the_name(tmp_path: Path) -> None:
    """Groups that differ in a span, a grid or a state are other KV."""
    tiers = "memory://4MiB", disk(tmp_path)

    def shape(span: int = 6, grid: int = 1, state: Any = STATE) -> KVGeometry:
        return KVGeometry.of(
            [
                LayerGroup("full", (0,), HEADS),
                LayerGroup("window", (1,), HEADS, span),
                LayerGroup("state", (2,), state=state, grid=grid),
            ],
            dtype="float32",
        )

    def opened(one: KVGeometry) -> KVStore:
        return KVStore(one, model="tiny@1", tiers=tiers, block_tokens=SIZE)

    with opened(shape()) as store:
        store.put_snapshot(TEXT, snapshot(store, TEXT[:8]), wait=True)
    others = [shape(7), shape(grid=64), shape(state=STATE[:1])]
    for other in others:
        with opened(other) as store:
            assert store.lookup(TEXT).tokens == store.lookup(TEXT).stored_tokens == 0
    with opened(shape()) as store:
        assert get(store, TEXT) == 8


def test_tenants_and_extras_are_kept_apart() -> None:
    with open_snapshots("all") as store:
        store.put_snapshot(TEXT, snapshot(store, TEXT[:13], tenant="a"), tenant="a")
        assert get(store, TEXT) == 0
        assert get(store, TEXT, tenant="a") == 13
        extra = [(2, b"a picture")]
        put(store, 13, extra=extra)
        assert get(store, TEXT) == 0
        assert get(store, TEXT, extra=extra) == 13
        assert get(store, TEXT, extra=[(2, b"another")]) == 0
        assert get(store, TEXT, extra=[*extra, (20, b"behind the position")]) == 13
        store.clear(tenant="a")
        assert store.lookup(TEXT, tenant="a").tokens == 0


def test_a_removal_takes_states_windows_and_what_followed() -> None:
    with open_snapshots("all") as store:
        for n in (8, 13, 20, 33):
            put(store, n)
        store.remove(TEXT[:20], 13)
        assert get(store, TEXT) == 13
        store.remove(TEXT[:4])
        quiet(store)
        assert store.stats().tiers[0].blocks == 0


@pytest.mark.parametrize("name", ["states alone", "window alone"])
def test_a_removal_takes_what_followed_also_without_full_attention(name: str) -> None:
    with open_snapshots(name) as store:
        for n in (8, 20, 33):
            put(store, n)
        store.remove(TEXT[:8])
        assert get(store, TEXT) == 0, "a longer prompt goes on from what was removed"
        quiet(store)
        assert store.stats().tiers[0].blocks == 0


def test_a_replacement_is_as_if_nothing_had_been_there() -> None:
    with open_snapshots("all") as store:
        other = snapshot(store, [7, *TEXT[1:20]])
        store.put_snapshot(TEXT, other)
        found = store.get_snapshot(TEXT)
        assert found is not None
        assert same(found, other)
        put(store, 20, replace=True)
        assert get(store, TEXT) == 20


def test_a_replacement_leaves_what_tenants_share() -> None:
    with open_snapshots("all", "memory://4MiB") as store:
        store.public.declare(TEXT[:16])
        put(store, 20, tenant="a")
        other = snapshot(store, [7, *TEXT[1:20]])
        store.put_snapshot(TEXT, other, tenant="b", replace=True)
        found = store.get_snapshot(TEXT, tenant="a")
        assert found is not None
        assert same(found, snapshot(store, TEXT[:20]))


def test_a_pin_keeps_all_that_resuming_needs() -> None:
    with open_snapshots("all", "memory://128KiB") as store:
        put(store, 12)
        assert store.pin(TEXT, 1000) == 12
        for first in range(40):
            row = [first, *range(30)]
            store.put_snapshot(row, snapshot(store, row))
        assert counter(store, "evictions", 0) > 0
        assert get(store, TEXT) == 12
        assert store.unpin(TEXT) == 12
        assert store.stats().tiers[0].pinned_bytes == 0


def test_a_pin_that_does_not_fit_leaves_the_pins_of_others() -> None:
    geometry = KVGeometry.of(
        [
            LayerGroup("full", (0,), AttentionShape(2, 256)),
            LayerGroup("state", (1,), state=STATE),
        ],
        dtype="float32",
    )
    pinned = TEXT[:40]
    longer = [*TEXT[:20], *range(500, 600)]  # begins as the pinned one does
    with KVStore(geometry, model="tiny@1", tiers=["memory://1MiB"], block_tokens=SIZE) as store:
        for row, seconds in ((pinned, 1000), ([7] * 60, 1000), (longer[:100], 10)):
            store.put_snapshot(row, snapshot(store, row))
            before = store.stats().tiers[0].pinned_bytes
            want = 0 if row[:1] != [7] and len(row) == 100 else len(row)
            assert store.pin(row, seconds) == want
        assert store.stats().tiers[0].pinned_bytes == before
        for first in range(40):
            row = [first, *range(40)]
            store.put_snapshot(row, snapshot(store, row))
        assert get(store, pinned) == 40


def test_the_end_of_a_pin_tells_what_was_pinned() -> None:
    with open_snapshots("state") as store:
        put(store, 12)
        assert store.pin(TEXT, 1000) == 12
        put(store, 21)  # of which nothing but the beginning is pinned
        assert store.unpin(TEXT) == 12
        assert store.unpin(TEXT) == 0
        assert store.stats().tiers[0].pinned_bytes == 0


def test_a_pin_can_end_behind_a_position_alone() -> None:
    with open_snapshots("all") as store:
        put(store, 12)
        put(store, 21)
        assert store.pin(TEXT[:12], 1000) == 12
        alone = store.stats().tiers[0].pinned_bytes
        assert store.pin(TEXT, 1000) == 21
        assert store.unpin(TEXT, 12) == 9
        assert store.unpin(TEXT, 12) == 0
        assert store.stats().tiers[0].pinned_bytes == alone
        assert store.unpin(TEXT) == 12
        assert store.stats().tiers[0].pinned_bytes == 0


def test_what_has_no_room_is_dropped_with_its_state() -> None:
    with open_snapshots("state", "memory://24KiB") as store:  # records take whole pages
        done = put(store, 40)
        assert done == Put(0, 0, 40, 0)
        assert get(store, TEXT) == 0


@pytest.mark.parametrize("name", ["windows", "window alone"])
def test_of_a_prompt_without_room_the_beginning_is_kept(name: str) -> None:
    with open_snapshots(name, "memory://24KiB") as store:  # records take whole pages
        done = put(store, 40, more=40)
        assert 0 < done.tokens < 40
        assert done.dropped == 40 - done.tokens
        assert get(store, TEXT) == done.tokens


MISTAKES: dict[str, tuple[Callable[[Snapshot], Any], str]] = {
    "nothing": (lambda _: None, "is None; a Snapshot"),
    "no tokens": (lambda s: replace(s, tokens=0), r"tokens 0 … 0; the prompt has 50"),
    "too long": (lambda s: replace(s, tokens=51), r"0 … 51; the prompt has 50"),
    "start": (lambda s: replace(s, start=2), "layer 0 of the snapshot has 12 tokens; .* are 10"),
    "no layer": (lambda s: replace(s, layers={}), "layer 0 of the snapshot is NoneType; it is one"),
    "more layers": (lambda s: replace(s, layers={**s.layers, 9: ()}), r"layers \[9\], which have"),
    "no pair": (
        lambda s: replace(s, layers={**s.layers, 1: s.layers[1][:1]}),
        r"layer 1 of the snapshot is 1 parts; it is a pair \(k, v\)",
    ),
    "no tensor": (
        lambda s: replace(s, layers={**s.layers, 1: (1, 2)}), "layer 1 of the snapshot is 2 parts"
    ),
    "shape": (
        lambda s: replace(s, layers={**s.layers, 2: tuple(p[..., 1:] for p in s.layers[2])}),
        r"layer 2 .* shape \(12, 1, 7\); 12 tokens in layout NHD have \(12, 1, 8\)",
    ),
    "dtype": (
        lambda s: replace(s, layers={**s.layers, 2: tuple(p.half() for p in s.layers[2])}),
        r"layer 2 of the snapshot is torch.float16; the geometry says torch.float32",
    ),
    "window": (
        lambda s: replace(s, layers={**s.layers, 1: tuple(p[1:] for p in s.layers[1])}),
        r"layer 1 of the snapshot has 8 tokens; to go on behind 12 it needs those from 3 on",
    ),
    "state missing": (lambda s: replace(s, state={}), r"lacks \[\(2, 'conv'\)"),
    "state": (
        lambda s: replace(s, state={**s.state, (2, "conv"): torch.zeros(3, 2)}),
        r"the state 'conv' of layer 2 is torch.float32 \(3, 2\); .* torch.bfloat16 \(3, 2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_change_nothing(name: str) -> None:
    spoil, said = MISTAKES[name]
    with open_snapshots("all") as store:
        with pytest.raises(InvalidValue, match=said):
            store.put_snapshot(TEXT, spoil(snapshot(store, TEXT[:12])))
        assert store.stats().tiers[0].blocks == 0
    with pytest.raises(IllegalStep, match="closed"):
        store.get_snapshot(TEXT)


def test_a_limit_is_within_the_prompt() -> None:
    with open_snapshots("all") as store:
        with pytest.raises(InvalidValue, match="limit"):
            store.get_snapshot(TEXT, limit=51)
        with pytest.raises(InvalidValue, match="layer is 5"):
            store.window_start(5, 10)
        states = snapshot(store, TEXT[:4]).state
    with open_snapshots("windows") as other:
        given = replace(snapshot(other, TEXT[:4]), state=states)
        with pytest.raises(InvalidValue, match="the geometry has none"):
            other.put_snapshot(TEXT, given)


def test_kinds_of_records_are_encoded_each_in_its_way() -> None:
    kinds = BlockShape(kinds=(BlockShape("float32", "NHD", ((1, 16),)), BlockShape()))
    codec = make_codec("int8", kinds)
    assert not codec.exact
    raw = bytearray(np.linspace(-1, 1, 64 * 16, dtype=np.float32).tobytes())
    for kind in (0, 1):
        whole = memoryview(raw + bytes([kind]))
        out = memoryview(bytearray(codec.bound(len(whole))))
        size = codec.encode(whole, out, b"")
        back = memoryview(bytearray(len(whole)))
        codec.decode(out[:size], back, b"")
        assert back[-1] == kind
        assert (back == whole) == (kind == 1)
        assert (size == len(whole)) == (kind == 1)
        out[size - 1] = 2
        with pytest.raises(Damaged, match="kind below 2"):
            codec.decode(out[:size], back, b"")
    assert make_codec("fp8", BlockShape(kinds=(BlockShape(),))).exact, "states alone"
