"""Lossy KV never flows back into an exact place, whatever moves it, and whoever puts it back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_kv import MODEL, disk, records

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import KVStore
from kvkeep.store.codecs import BlockShape, make_codec
from kvkeep.store.tiers.opening import tiering as make_tiering
from kvkeep.store.tiers.record import BEHIND, EXACT, HEADER_BYTES, mark, origin, read_header
from kvkeep.store.tiers.record_codec import NotForUs, RecordCodec

SHAPE = KVGeometry(2, 2, 32, "bfloat16")
BLOCK = 4
TIERINGS = ("inclusive", "inclusive:2", "exclusive", "exclusive:2")
MEMORY = "memory://1MiB"
PROMPT = range(24)


def truth(tokens: int) -> torch.Tensor:
    """Exact KV of the first tokens of the one prompt there is."""
    generator = torch.Generator().manual_seed(7)
    kv = torch.randn(64, 2, 2, 2, 32, generator=generator).bfloat16()
    return kv[:tokens].permute(1, 2, 0, 3, 4).contiguous()


def opened(*tiers: str, tiering: str = "inclusive") -> KVStore:
    options = {"block_tokens": BLOCK, "policy": make_tiering(tiering)}
    return KVStore(SHAPE, model=MODEL, tiers=tiers, **options)


def got(store: KVStore, tokens: int, start: int = 0) -> tuple[torch.Tensor, int, list]:
    """KV, tokens and sources of a get."""
    sources: list[tuple[str, int]] = []
    kv, count = store.get(range(tokens), start, sources=sources)
    return kv, count, sources


def filled(place: Path, tokens: int = len(PROMPT), *, tail: bool = False) -> str:
    """The URL of a lossy tier that has the prompt."""
    url = disk(place, codec="int8")
    with opened(MEMORY, url) as store:
        store.put(range(tokens), truth(tokens), tail=tail, wait=True)
    assert records(place)
    return url


def assert_exact(place: Path) -> int:
    """Every record there is a part of the truth, bit for bit; return their number."""
    whole = truth(64)
    exact = set()
    for start in range(64):
        for stop in range(start + 1, min(64, start + BLOCK) + 1):
            part = whole[:, :, start:stop].contiguous()
            exact.add(part.view(torch.uint8).numpy().tobytes())
    found = records(place)
    for file in found:
        raw = file.read_bytes()
        header = read_header(raw)
        assert not header.inexact
        shape = BlockShape("bfloat16", "NHD", ((2, 32),) * 4)
        codec = make_codec({0: "raw", 1: "lossless"}[header.codec], shape)
        out = memoryview(bytearray(header.raw_bytes))
        codec.decode(memoryview(bytearray(raw[HEADER_BYTES:])), out, b"")
        assert bytes(out) in exact, "lossy KV in an exact tier"
    return len(found)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("tiering", TIERINGS)
@pytest.mark.parametrize("above", [True, False])
def test_reading_copies_no_lossy_block(tmp_path, tiering, codec, above):
    """Promotion, demotion and moves between levels, with the exact tier above or below."""
    lossy = filled(tmp_path / "lossy")
    exact = disk(tmp_path / "exact", codec=codec)
    tiers = (exact, lossy) if above else (lossy, exact)
    with opened("memory://24KiB", *tiers, tiering=tiering) as store:
        for _ in range(5):
            assert got(store, 24)[1] == 24
        store.flush()
        assert got(store, 24)[1] == 24
    assert assert_exact(tmp_path / "exact") == 0
    assert len(records(tmp_path / "lossy")) == len(PROMPT) // BLOCK  # moved nowhere


@pytest.mark.parametrize("exact", [0, 3, 4, 10, 22, 23, 40])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("start", [0, 6])
def test_a_caller_says_how_many_tokens_are_exact(tmp_path, exact, given, start):
    """Its word counts, whether the store gave out such KV before or not."""
    lossy = filled(tmp_path / "lossy")
    kv = inexact_behind(exact, 23)
    with opened(MEMORY, disk(tmp_path / "exact"), lossy) as store:
        if given:
            assert got(store, 24)[1] == 24
        put = store.put(range(23), kv[:, :, start:], start, tail=True, wait=True, exact=exact)
        assert put.dropped == 0
    first = -(-start // BLOCK)
    ends = [*range(BLOCK * (first + 1), 24, BLOCK), 23]
    written = sum(end <= exact for end in ends)
    assert assert_exact(tmp_path / "exact") == written


def inexact_behind(exact: int, tokens: int) -> torch.Tensor:
    kv = truth(tokens)
    kv[:, :, exact:] += 1
    return kv


def test_one_lossy_read_keeps_no_other_prompt_out_of_the_exact_tier(tmp_path):
    """What is put is exact unless the put says otherwise: of this request alone."""
    lossy, exact = filled(tmp_path / "lossy", BLOCK), disk(tmp_path / "exact")
    with opened(MEMORY, exact, lossy) as store:
        found = store.get(range(BLOCK))
        assert (found.tokens, found.exact) == (BLOCK, 0)
        kv = inexact_behind(0, 16)
        assert store.put(range(16), kv, wait=True, exact=found.exact).dropped == 0
        assert not records(tmp_path / "exact")
        assert store.stats().tiers[1].counters["drops"] == 0
        store.clear()
        for number in range(3):
            other = [0, *range(100 * number + 100, 100 * number + 115)]
            store.put(other, truth(16), wait=True)
        assert len(records(tmp_path / "exact")) == 12
        with pytest.raises(InvalidValue, match="exact"):
            store.put(range(24), truth(24), exact=-1)


@pytest.mark.parametrize("how", ["get", "sink"])
@pytest.mark.parametrize(("length", "start"), [(24, 0), (22, 0), (24, 6), (24, 5)])
def test_a_get_says_how_much_is_exact(tmp_path, how, length, start):
    lossy, exact = filled(tmp_path / "lossy", length, tail=True), disk(tmp_path / "exact")
    with opened(MEMORY, exact) as store:
        store.put(range(2 * BLOCK), truth(2 * BLOCK), wait=True)
    with opened(MEMORY, exact, lossy) as store:
        sink = (lambda *_: True) if how == "sink" else None
        assert store.get(range(length), start, sink=sink).exact == 2 * BLOCK
        assert store.get(range(2 * BLOCK), sink=sink).exact is None


@pytest.mark.parametrize("tiering", TIERINGS)
def test_what_a_caller_was_given_comes_back_lossy(tmp_path, tiering):
    """An engine puts what it has: KV that it loaded, and KV that it computed behind it."""
    lossy, exact = filled(tmp_path / "lossy"), disk(tmp_path / "exact", codec="lossless")
    with opened(MEMORY, exact, lossy, tiering=tiering) as store:
        loaded = store.get(range(24))
        store.clear()
        assert not records(tmp_path / "lossy")
        kv = truth(40)
        kv[:, :, :24] = loaded.kv
        for _ in range(3):
            store.put(range(32), kv[:, :, :32], wait=True, exact=loaded.exact)
            store.put(range(40), kv[:, :, 32:], start=32, wait=True, exact=loaded.exact)
            got(store, 40)
        store.flush()
    assert assert_exact(tmp_path / "exact") == 0
    if tiering in ("inclusive", "inclusive:2"):
        assert len(records(tmp_path / "lossy")) == 10
    with opened(MEMORY, lossy) as store:
        assert all(", int8" in name for name, _ in got(store, 40)[2])


def test_exact_kv_replaces_lossy_kv_in_memory(tmp_path):
    """Nobody was given the lossy block: what is put now was computed."""
    lossy, exact = filled(tmp_path / "lossy"), disk(tmp_path / "exact")
    with opened(MEMORY, exact, lossy) as store:
        assert store.prefetch(PROMPT).wait(5) == 24
        put = store.put(PROMPT, truth(24), wait=True)
        assert put.tokens == 24
        loaded, _, sources = got(store, 24)
        assert torch.equal(loaded, truth(24))
        assert sources == [("memory", 24)]
    assert assert_exact(tmp_path / "exact") == len(PROMPT) // BLOCK


def test_a_tier_that_becomes_exact_serves_nothing_lossy(tmp_path):
    filled(tmp_path / "d")
    with opened(MEMORY, disk(tmp_path / "d", codec="lossless")) as store:
        assert got(store, 24)[1] == 0


def test_sources_name_the_codec(tmp_path):
    lossy, exact = filled(tmp_path / "lossy"), disk(tmp_path / "exact")
    with opened(MEMORY, exact, lossy) as store:
        assert [name.partition(", ")[2] for name, _ in got(store, 24)[2]] == ["int8"]
        loaded, _, again = got(store, 24)
        assert again == [("memory, int8", 24)]
        kv = truth(32)
        kv[:, :, :24] = loaded
        store.put(range(32), kv, wait=True, exact=0)
        assert got(store, 32)[2] == [("memory, int8", 24), ("memory, inexact", 8)]


@pytest.mark.skipif(not shutil.which("true"), reason="Linux only")
def test_memory_of_the_node_carries_the_mark(tmp_path):
    """Another process, with an exact tier only, finds a lossy block in the node's memory."""
    lossy, exact = filled(tmp_path / "lossy"), disk(tmp_path / "exact")
    shared = f"shm://4MiB?dir={tmp_path}"
    with opened(shared, lossy) as one, opened(shared, exact) as other:
        assert got(one, 24)[1] == 24
        for _ in range(3):
            assert got(other, 24)[2] == [("shm, int8", 24)]
        other.flush()
    assert assert_exact(tmp_path / "exact") == 0


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_an_exact_codec_in_a_lossy_tier_flags_its_records(codec):
    """As of a tier that chooses its codec: what is not exact stays so behind an exact codec."""
    shape = BlockShape("bfloat16", "NHD", ((2, 32),) * 4)
    number = {"raw": 0, "lossless": 1}[codec]
    tier = RecordCodec(make_codec(codec, shape), lambda _: None)
    for made in (BEHIND, 2, EXACT):
        record = memoryview(bytearray(HEADER_BYTES + 4096))
        mark(record, made)
        assert origin(record) == made
        encoded = memoryview(bytearray(tier.encode(bytes(48), record)))
        header = read_header(encoded)
        assert (header.codec, header.inexact) == (number, made != EXACT)
        if made == EXACT:
            assert tier.verify(bytes(48), encoded)[0] == header
        else:
            with pytest.raises(NotForUs, match="not exact"):
                tier.verify(bytes(48), encoded)
        final = tier.decode_alone(make_codec(codec, shape), header, encoded)
        assert origin(final) == (EXACT if made == EXACT else BEHIND)


class LossyFlow(RuleBasedStateMachine):
    """An engine over memory, an exact and a lossy tier: only exact KV reaches the exact tier.

    The engine keeps KV by token, as its pool does: loaded, or computed. Computed KV is the truth
    only if all KV before it is; otherwise it is a little different.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvkeep-flow-"))
        self.store: KVStore | None = None
        self.pool = truth(0)
        self.exact: int | None = None  # leading exact tokens of the pool

    @initialize(tiering=st.sampled_from(TIERINGS), above=st.booleans())
    def open(self, tiering, above):
        self.reopen(tiering, above, MEMORY, lost=False)

    @rule(
        tiering=st.sampled_from(TIERINGS),
        above=st.booleans(),
        memory=st.sampled_from(["memory://32KiB", MEMORY]),
        lost=st.booleans(),
    )
    def reopen(self, tiering, above, memory, lost):
        """A new process: its pool is empty, and the exact tier may be, too."""
        self.close()
        if lost:
            shutil.rmtree(self.folder / "exact", ignore_errors=True)
        if not records(self.folder / "lossy"):
            filled(self.folder / "lossy", 30, tail=True)
        exact = disk(self.folder / "exact", codec="lossless", size="64KiB")
        lossy = disk(self.folder / "lossy", codec="int8", size="1MiB")
        tiers = (exact, lossy) if above else (lossy, exact)
        self.store = opened(memory, *tiers, tiering=tiering)
        self.pool, self.exact = truth(0), None

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def compute(self, tokens: int) -> None:
        """Prefill up to ``tokens`` behind what the pool has."""
        have = self.pool.shape[2]
        if have < tokens:
            new = truth(tokens)[:, :, have:]
            if not torch.equal(self.pool, truth(have)):
                new = new + 0.01
            self.pool = torch.cat([self.pool, new], 2)

    @rule(
        kept=st.sampled_from([0, 0, 7, 20]),
        asked=st.integers(0, 40),
        tokens=st.integers(1, 48),
        whole=st.booleans(),
        tail=st.booleans(),
    )
    def request(self, kept, asked, tokens, whole, tail):
        """Load what the pool lacks, of which it kept a part; compute the rest; store it."""
        self.pool = self.pool[:, :, :kept]
        have = self.pool.shape[2]
        if self.exact is not None and self.exact >= have:
            self.exact = None
        if have < asked:
            found = self.store.get(range(asked), have)
            if found.tokens:
                self.pool = torch.cat([self.pool, found.kv], 2)
                self.exact = found.exact if self.exact is None else self.exact
        start = 0 if whole else self.pool.shape[2] // BLOCK * BLOCK
        self.compute(tokens)
        if start < tokens:
            kv = self.pool[:, :, start:tokens]
            self.store.put(range(tokens), kv, start=start, tail=tail, wait=True, exact=self.exact)

    @rule(tokens=st.integers(1, 40))
    def prefetch(self, tokens):
        self.store.prefetch(range(tokens)).wait(5)

    @rule()
    def clear(self):
        self.store.clear()

    @rule()
    def flush(self):
        self.store.flush()

    @invariant()
    def exact_stays_exact(self):
        assert_exact(self.folder / "exact")

    def teardown(self):
        self.close()
        assert_exact(self.folder / "exact")
        shutil.rmtree(self.folder)


LossyFlow.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # slow because it is real
)
TestLossyFlow = LossyFlow.TestCase
