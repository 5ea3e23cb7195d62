"""`auto`: the choice, its file, records that stay readable, and what a tier says."""

from __future__ import annotations

import json
import os

import pytest
import torch
from codec_blocks import KEY, LLAMA, NAME, block
from hypothesis import given
from hypothesis import strategies as st
from transform_bases import basis_of

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import KVStore
from kvkeep.store.codecs import AutoCodec, BlockShape, Damaged, make_codec
from kvkeep.store.codecs.auto import AutoSetting, CodecSpeed, choose, seconds_to_read

SPEEDS = {
    "raw": CodecSpeed(1.0, 1e10),
    "lossless": CodecSpeed(1.5, 1.5e9),
    "int8": CodecSpeed(1.94, 1.6e9, 1e-5),
    "int4": CodecSpeed(3.8, 5e8, 5e-4),
}
MIB = 1 << 20


def figures(path, nats=None, parts=LLAMA.parts, **more):
    known = {"int8": 1e-5, "int4": 5e-4} if nats is None else nats
    codecs = [{"codec": name, "nats": value} for name, value in known.items()]
    path.write_text(json.dumps({"kvkeep_codecs": 1, "parts": parts, "codecs": codecs} | more))
    return path


@pytest.mark.parametrize(
    ("bandwidth", "nats", "best"),
    [
        (1e10, 1e-3, "raw"), (3e9, 1e-3, "raw"), (5e8, 1e-3, "int8"), (1e8, 1e-3, "int4"),
        (1e8, 1e-4, "int8"), (1e8, 0.0, "lossless"), (1e6, 4e-4, "int8"),
    ],
)  # fmt: skip
def test_slow_tiers_get_small_records_and_fast_ones_fast_decoding(bandwidth, nats, best):
    assert choose(SPEEDS, nats, MIB, bandwidth=bandwidth) == best


speeds = st.builds(CodecSpeed, st.floats(1, 20), st.floats(1e7, 1e11), st.floats(0, 1e-2))


@given(
    some=st.dictionaries(st.text(max_size=3), speeds, min_size=1, max_size=6),
    nats=st.floats(0, 1e-2),
    raw=st.integers(1, 1 << 30),
    place=st.tuples(st.floats(0, 1), st.floats(1e4, 1e12)),
    data=st.data(),
)
def test_no_allowed_codec_is_faster(some, nats, raw, place, data):
    latency, bandwidth = place
    some["exact"] = CodecSpeed(1.0, 1e10)
    now = data.draw(st.sampled_from([None, *some]))
    chosen = choose(some, nats, raw, latency=latency, bandwidth=bandwidth, now=now)
    assert some[chosen].nats <= nats
    took = {n: seconds_to_read(raw, one, latency, bandwidth) for n, one in some.items()}
    least = min(took[name] for name, one in some.items() if one.nats <= nats)
    assert took[chosen] * (0.9 if chosen == now else 1) <= least
    if now in some and some[now].nats <= nats and took[now] * 0.9 < least:
        assert chosen == now


def test_a_little_better_does_not_change_the_codec():
    close = {"raw": CodecSpeed(1.0, 1e10), "lossless": CodecSpeed(1.05, 1e10)}
    assert choose(close, 0.0, MIB, bandwidth=1e8) == "lossless"
    assert choose(close, 0.0, MIB, bandwidth=1e8, now="raw") == "raw"
    assert choose(SPEEDS, 0.0, MIB, bandwidth=1e8, now="raw") == "lossless"


def test_without_figures_no_lossy_codec_is_chosen(tmp_path):
    auto = make_codec("auto:nats=1", LLAMA)
    assert isinstance(auto, AutoCodec)
    assert auto.exact
    assert [codec.name for codec, _ in auto.codecs] == ["raw", "lossless"]
    path = figures(tmp_path / "f")
    assert not make_codec(f"auto:nats=1e-3,figures={path}", LLAMA).exact
    assert make_codec(f"auto:nats=1e-6,figures={path}", LLAMA).exact
    assert make_codec(f"auto:figures={path}", LLAMA).exact


def test_records_have_the_number_of_the_codec_chosen(tmp_path):
    path = figures(tmp_path / "f")
    raw = memoryview(bytearray(block(LLAMA, 256)))
    for key in (None, KEY):
        for bandwidth, smaller in (("1KB", 3), ("1KB/s", 3)):
            auto = make_codec(f"auto:nats=1e-3,figures={path},bandwidth={bandwidth}", LLAMA, key)
            chosen = auto.chosen(raw)
            assert chosen.name.startswith("int4")
            assert auto.label == f"auto: {chosen.name}"
            out = memoryview(bytearray(auto.bound(len(raw))))
            size = auto.encode(raw, out, NAME)
            assert size * smaller < len(raw)
            back = memoryview(bytearray(len(raw)))
            chosen.decode(out[:size], back, NAME)
            with pytest.raises(Damaged):
                auto.decode(out[:size], back, NAME)


def test_the_bandwidth_is_learned():
    raw = memoryview(bytearray(block(LLAMA, 256)))
    auto = make_codec("auto", LLAMA)
    link: list[tuple[float, float] | None] = [None]
    assert auto.follow(lambda: link[0])
    auto.chosen(raw)  # nothing is known yet
    for speed, best in ((1e5, "lossless"), (1e13, "raw"), (1e5, "lossless")):
        link[0] = 0.0, speed
        for _ in range(64):  # it chooses anew
            auto.chosen(raw)
        assert auto.chosen(raw).name == best
    link[0] = 1e6, 1e5  # beside such a latency, no codec gains anything
    for _ in range(64):
        auto.chosen(raw)
    assert auto.chosen(raw).name == "lossless"
    assert not make_codec("auto:bandwidth=1GB/s", LLAMA).follow(lambda: None)
    assert not make_codec("raw", LLAMA).follow(lambda: None)


@pytest.mark.parametrize(
    "text", ["nats", "nats=", "nats=x", "nats=-1", "nats=inf", "bits=4", "bandwidth=0B",
             "bandwidth=fast", "nats=1,nats=2", "nats=1,,"],
)  # fmt: skip
def test_wrong_settings_are_refused(text):
    with pytest.raises(InvalidValue):
        AutoSetting.of(text)


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(InvalidValue, match="cannot read"):
        make_codec(f"auto:nats=1,figures={tmp_path / 'none'}", LLAMA)
    for bad in ("", "[]", "{}", '{"kvkeep_codecs": "2"}', "null", '{"kvkeep_codecs": 1}'):
        (tmp_path / "f").write_text(bad)
        with pytest.raises(InvalidValue, match="no file of codecs"):
            make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)
    figures(tmp_path / "f", {"int8": 0.1}, kvkeep_codecs=2)
    with pytest.raises(InvalidValue, match="in version 2; this kvkeep reads 1"):
        make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)
    own = f"auto:nats=1,figures={tmp_path / 'f'}"
    for nats in (
        {"int8": -1}, {"int8": float("nan")}, {"int8": "x"}, {"int8": 10**400}, {own: 0.1},
        {"auto": 0.1},
    ):  # fmt: skip
        figures(tmp_path / "f", nats)
        with pytest.raises(InvalidValue, match="no file of codecs"):
            make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)
    figures(tmp_path / "f", parts=[[2, 64]])
    with pytest.raises(InvalidValue, match="another model"):
        make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)
    figures(tmp_path / "f", parts=[[float("inf"), 64]])
    with pytest.raises(InvalidValue, match="no file of codecs"):
        make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)
    figures(tmp_path / "f", {"int5": 0.1})
    with pytest.raises(InvalidValue, match="int5"):
        make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)
    with pytest.raises(InvalidValue, match="another model"):
        make_codec(f"auto:nats=1,figures={figures(tmp_path / 'f')}", BlockShape())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes there")
def test_a_pipe_in_place_of_the_figures_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "f")
    with pytest.raises(InvalidValue, match="no file of codecs"):
        make_codec(f"auto:nats=1,figures={tmp_path / 'f'}", LLAMA)


def test_records_of_all_allowed_bases_are_read(tmp_path):
    shape = BlockShape("bfloat16", "NHD", ((2, 16),) * 2)
    names = {}
    for seed in (0, 1):
        basis_of(shape, seed=seed).save(tmp_path / f"{seed}.basis")
        names[f"transform:basis={tmp_path}/{seed}.basis"] = 1e-4
    path = figures(tmp_path / "f", names, parts=[list(part) for part in shape.parts])
    auto = make_codec(f"auto:nats=1e-3,figures={path}", shape)
    raw = memoryview(bytearray(block(shape, 64)))
    transforms = [codec for codec, _ in auto.codecs if codec.name == "transform"]
    records = []
    for codec in transforms:
        out = memoryview(bytearray(codec.bound(len(raw))))
        records.append(out[: codec.encode(raw, out, NAME)])
    assert len({bytes(record[:16]) for record in records}) == 2  # digests
    for reader in transforms:
        for record in records:
            reader.decode(record, memoryview(bytearray(len(raw))), NAME)


def test_a_tier_reads_what_it_wrote_under_other_choices(tmp_path):
    shape = KVGeometry(2, 2, 32, "bfloat16")
    path = figures(tmp_path / "f")
    kv = torch.randn(2, 2, 512, 2, 32).bfloat16()

    def opened(codec):
        url = f"file://{tmp_path}/tier?size=64MiB&sync=never&codec={codec}"
        return KVStore(shape, model="m@1", tiers=["memory://4MiB", url], block_tokens=64)

    slow = f"auto:nats=1e-3,figures={path},bandwidth=1KB/s"
    for codec, tokens, said in (
        ("auto:bandwidth=1TB/s", 128, "auto: raw"),
        (slow, 256, "auto: int4"),
        (f"auto:nats=1e-3,figures={path},bandwidth=1TB/s", 512, "auto: raw"),
    ):
        with opened(codec) as store:
            store.put(range(tokens), kv[:, :, :tokens], wait=True)
            assert store.stats().tiers[1].codec == said
    with opened(slow) as store:
        back, count = store.get(range(512))
        assert count == 512
        assert torch.equal(back[:, :, :128], kv[:, :, :128])
        assert not torch.equal(back[:, :, 128:256], kv[:, :, 128:256])
        assert (back - kv).abs().max() < 0.5
        assert torch.equal(back[:, :, 256:], kv[:, :, 256:])
    with opened("auto") as store:  # exact now: it does not serve what is lossy
        assert store.get(range(512))[1] == 128
