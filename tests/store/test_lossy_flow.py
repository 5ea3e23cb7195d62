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
from kvkeep.store.tiers.inexact import BEHIND, EXACT, InexactBlocks, mark, origin
from kvkeep.store.tiers.opening import tiering as make_tiering
from kvkeep.store.tiers.record import HEADER_BYTES, read_header
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


def test_what_a_caller_said_is_remembered(tmp_path):
    """Put again without a word, or as the beginning of another prompt, it is not exact."""
    with opened(MEMORY, disk(tmp_path / "exact"), disk(tmp_path / "lossy", codec="int8")) as store:
        store.put(range(24), inexact_behind(10, 24), wait=True, exact=10)
        store.put(range(28), inexact_behind(10, 28), wait=True)
        store.put([*range(11), *range(90, 97)], inexact_behind(10, 18), wait=True)
        assert assert_exact(tmp_path / "exact") == 2
        store.put(range(24), truth(24), wait=True, exact=24)
        assert assert_exact(tmp_path / "exact") == 6
        assert torch.equal(got(store, 24)[0], truth(24))
        with pytest.raises(InvalidValue, match="exact"):
            store.put(range(24), truth(24), exact=-1)


@pytest.mark.parametrize("how", ["get", "sink"])
@pytest.mark.parametrize("length", [24, 22])
def test_the_beginning_of_a_block_comes_back_lossy_in_another_prompt(tmp_path, how, length):
    """An engine shares pages that are smaller than blocks, behind a block that is exact."""
    lossy = filled(tmp_path / "lossy", length, tail=True)
    exact = disk(tmp_path / "exact")
    with opened(MEMORY, exact) as store:
        store.put(range(BLOCK), truth(BLOCK), wait=True)
    with opened(MEMORY, exact, lossy) as store:
        kv = truth(40)
        if how == "get":
            kv[:, :, :length] = got(store, length)[0]
        else:

            def take(start, stop, part, source):
                kv[:, :, start:stop] = part
                return True

            store.get(range(length), sink=take)
        for same in range(BLOCK + 1, length):
            other = [*range(same), *range(100, 140 - same)]
            store.put(other, kv, wait=True)
        store.put([*range(BLOCK), *range(200, 236)], truth(40), wait=True)  # shares nothing more
        store.flush()
    count = 0
    for file in records(tmp_path / "exact"):
        count += not read_header(file.read_bytes()).inexact
    assert count == 1 + 36 // BLOCK


@pytest.mark.parametrize("tiering", TIERINGS)
def test_what_a_caller_was_given_comes_back_lossy(tmp_path, tiering):
    """An engine puts what it has: KV that it loaded, and KV that it computed behind it."""
    lossy, exact = filled(tmp_path / "lossy"), disk(tmp_path / "exact", codec="lossless")
    with opened(MEMORY, exact, lossy, tiering=tiering) as store:
        loaded = got(store, 24)[0]
        store.clear()
        assert not records(tmp_path / "lossy")
        kv = truth(40)
        kv[:, :, :24] = loaded
        for _ in range(3):
            store.put(range(32), kv[:, :, :32], wait=True)
            store.put(range(40), kv[:, :, 32:], start=32, wait=True)
        store.flush()
    assert assert_exact(tmp_path / "exact") == 0
    if tiering in ("inclusive", "inclusive:2"):
        assert len(records(tmp_path / "lossy")) == 10
    with opened(MEMORY, lossy) as store:
        assert all(", int8" in name for name, _ in got(store, 40)[2])


def test_a_tail_is_remembered_by_its_tokens(tmp_path):
    """A longer prompt has the tail's tokens in a block of another name."""
    lossy, exact = filled(tmp_path / "lossy", 6, tail=True), disk(tmp_path / "exact")
    with opened(MEMORY, exact, lossy) as store:
        loaded, count, _ = got(store, 6)
        assert count == 6
        store.clear()
        kv = truth(16)
        kv[:, :, :6] = loaded
        store.put(range(16), kv[:, :, 4:], start=4, wait=True)
        store.flush()
    assert assert_exact(tmp_path / "exact") == 0


@pytest.mark.parametrize("start", [0, 8])
def test_a_shorter_prompt_has_the_first_tokens_of_a_lossy_block(tmp_path, start):
    """It ends in the middle of the block, with a tail of another name."""
    lossy, exact = filled(tmp_path / "lossy"), disk(tmp_path / "exact")
    with opened(MEMORY, exact, lossy) as store:
        kv = truth(24)
        kv[:, :, start:] = got(store, 24, start)[0]
        for tokens in (start + 1, start + 3):
            store.put(range(tokens), kv[:, :, :tokens], tail=True, wait=True)
        store.flush()
    assert_exact(tmp_path / "exact")


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
        store.put(range(32), kv, wait=True)
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
        assert tier.refuses(record) == (made != EXACT)
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


def test_blocks_are_remembered_for_ever():
    blocks = [bytes(16) + bytes([n % 256, n // 256]) * 16 for n in range(500)]
    hashed = torch.randint(256, (4000, 48), generator=torch.Generator().manual_seed(0))
    many = [bytes(row) for row in hashed.tolist()]
    found = InexactBlocks()
    assert not found
    assert found.exact(blocks, many) == len(many)
    found.add(many[:2000])
    assert all(block in found for block in many[:2000])
    assert not any(block in found for block in many[2000:])
    assert found.exact(many[:1], many[2000:]) == 0
    assert found.exact(many[3000:], [*many[2000:2005], many[0], many[2005]]) == 5


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
        self.pool = truth(0)

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
        if have < asked:
            kv, count, _ = got(self.store, asked, have)
            if count:
                self.pool = torch.cat([self.pool, kv], 2)
        start = 0 if whole else self.pool.shape[2] // BLOCK * BLOCK
        self.compute(tokens)
        if start < tokens:
            kv = self.pool[:, :, start:tokens]
            self.store.put(range(tokens), kv, start=start, tail=tail, wait=True)

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
