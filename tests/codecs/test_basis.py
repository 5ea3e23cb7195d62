"""Basis files: written, read, and refused; and what a fit makes of numbers."""

from __future__ import annotations

import hashlib
import json
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transform_bases import TURNED, turned_basis

from kvkeep.core.errors import InvalidValue
from kvkeep.store.codecs.basis import load_basis
from kvkeep.store.codecs.basis_fit import BasisFit, grouping


@pytest.fixture
def path(tmp_path):
    turned_basis().save(tmp_path / "basis")
    return tmp_path / "basis"


def test_a_file_holds_all_of_it(path):
    made, read = turned_basis(), load_basis(path)
    assert (read.model, read.parts, read.rotated, read.longest, read.digest) == (
        made.model, made.parts, made.rotated, made.longest, made.digest,
    )  # fmt: skip
    assert (read.speeds == made.speeds).all()
    for ours, theirs in zip(made.groups, read.groups, strict=True):
        assert ours.heads == theirs.heads
        for one, other in zip(ours.arrays(), theirs.arrays(), strict=True):
            assert one.dtype == other.dtype
            assert (one == other).all()
    assert os.listdir(path.parent) == ["basis"], "nothing beside it"


def test_the_digest_names_the_content(path):
    assert path.read_bytes()[-32:][:16] == load_basis(path).digest
    assert turned_basis(seed=1).digest != turned_basis().digest


def rewritten(path, change) -> None:
    """Change the description of a file and sign it anew."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<I", content, 12)
    said = json.loads(content[16 : 16 + length])
    change(said)
    text = json.dumps(said).encode()
    body = content[:12] + struct.pack("<I", len(text)) + text + content[16 + length : -32]
    path.write_bytes(body + hashlib.sha256(body).digest())


def _set(*keys, value):
    def change(said):
        for key in keys[:-1]:
            said = said[key]
        said[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("model", value=3),
        _set("parts", value=[[2, 32]]),
        _set("parts", value=[[2, 10**9]] * 4),
        _set("parts", value=[[10**6, 32]] * 4),
        _set("parts", value=[[-2, 32]] * 4),
        _set("parts", 0, value=[2, 32, 1]),
        _set("rotated", value=[0, 9]),
        _set("rotated", value=[2, 0]),
        _set("rotated", value=[]),
        _set("pairs", value=17),
        _set("pairs", value=True),
        _set("longest", value=-1),
        _set("longest", value=1e9),
        _set("groups", value=[]),
        _set("groups", 0, "heads", value=[0, 0]),
        _set("groups", 0, "heads", value=[99]),
        _set("groups", 0, "rank", value=1025),
        _set("groups", 0, "rank", value="9"),
        lambda said: said.pop("groups"),
    ],
)
def test_wrong_descriptions_are_refused(path, change):
    rewritten(path, change)
    with pytest.raises(InvalidValue, match="is no basis: its description is wrong"):
        load_basis(path)


def test_sizes_are_checked_before_memory_is_taken(path):
    rewritten(path, _set("groups", 0, "rank", value=3))
    with pytest.raises(InvalidValue, match="should have"):
        load_basis(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 bytes"),
        (b"kvkeepT\n\1\0\0", "has 11 bytes"),
        (b"PK\3\4" + bytes(100), "kvkeep codec fit makes one"),
        (struct.pack("<8sII", b"kvkeepT\n", 2, 10) + bytes(50), "of version 2"),
        (struct.pack("<8sII", b"kvkeepT\n", 1, 2**31) + bytes(50), "bytes of description"),
        (struct.pack("<8sII", b"kvkeepT\n", 1, 50) + b"[" * 50, "description is wrong"),
        (struct.pack("<8sII", b"kvkeepT\n", 1, 2) + b"{}" + bytes(32), "description is wrong"),
    ],
)
def test_other_files_are_refused(tmp_path, content, said):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(InvalidValue, match=said):
        load_basis(tmp_path / "bad")


def test_no_file_and_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, said in (
        ("none", "cannot be read"),
        ("pipe", "not a file"),
        (".", "cannot be read"),
    ):
        with pytest.raises(InvalidValue, match=said):
            load_basis(tmp_path / place)
    with pytest.raises(InvalidValue, match="cannot be written"):
        turned_basis().save(tmp_path / "no folder" / "basis")


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_damage_is_refused(tmp_path_factory, where, bit, cut):
    path = tmp_path_factory.getbasetemp() / "damaged-basis"
    turned_basis().save(path)
    content = bytearray(path.read_bytes())
    at = int(where * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(InvalidValue):
        load_basis(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0])
def test_numbers_that_no_fit_writes_are_refused(path, value):
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<I", content, 12)
    made = turned_basis()
    at = 16 + length + made.speeds.nbytes + made.groups[0].mean.nbytes  # the first scale
    struct.pack_into("<f", content, at, value)
    body = bytes(content[:-32])
    path.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(InvalidValue, match=r"not finite|not above 0"):
        load_basis(path)


def test_keys_and_values_of_heads_are_together():
    two_heads = [(2, 32)] * 4
    assert grouping(two_heads, [0, 2], 256) == [(0, 1, 4, 5, 2, 3, 6, 7)]
    assert grouping(two_heads, [0, 2], 128) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert grouping(two_heads, [0, 2], 64) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grouping(two_heads, [], 32) == [(0,), (2,), (1,), (3,), (4,), (6,), (5,), (7,)]
    assert grouping([(1, 576)] * 3, [], 256) == [(0,), (1,), (2,)]
    for parts, width in ((two_heads, 0), (two_heads, 1025), ([(1, 1025)], 64)):
        with pytest.raises(InvalidValue, match="1024 channels"):
            grouping(parts, [], width)


@given(
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=6),
    width=st.integers(1, 128),
)
@settings(max_examples=100, deadline=None)
def test_each_head_is_in_one_group(parts, width):
    dims = [dim for heads, dim in parts for _ in range(heads)]
    groups = grouping(parts, [0], width)
    assert sorted(head for group in groups for head in group) == list(range(len(dims)))
    for group in groups:
        assert len(group) == 1 or sum(dims[head] for head in group) <= max(width, *dims)


def test_more_noise_is_fewer_and_smaller_codes():
    coarse, fine = turned_basis(noise=1.0), turned_basis(noise=1e-3)
    for few, many in zip(coarse.groups, fine.groups, strict=True):
        assert few.rank < many.rank
        assert few.spread.sum() < many.spread.sum()
        assert (few.tolerance > many.tolerance).all()


def test_what_costs_more_is_coded_more_exactly():
    """Channels whose gradients are four times as large have errors nearly a fourth as large."""
    generator = torch.Generator().manual_seed(0)
    fit = BasisFit([(1, 8)], [], np.empty(0))
    numbers, gradients = (torch.randn(5000, 1, 8, generator=generator) for _ in range(2))
    gradients[..., :4] *= 4
    fit.add_numbers([numbers])
    fit.add_gradients([gradients], 100)
    (group,) = fit.basis(1e-1, "", 1).groups
    assert 3 < group.tolerance[4:].mean() / group.tolerance[:4].mean() < 4


def test_nats_are_shared_out_by_water_filling():
    fit = BasisFit(TURNED.parts, [], np.empty(0))
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(600, 2, 32, generator=generator) for _ in TURNED.parts]
    fit.add_numbers(parts)
    fit.add_gradients(parts, 100)
    spectrum = torch.cat(fit.spectra())
    for nats in (1e-3, 1e-1, float(spectrum.sum()) / 2):
        noise = fit.noise_of(nats)
        assert float(spectrum.clamp(max=noise).sum()) == pytest.approx(nats, rel=1e-6)


def test_a_fit_needs_numbers_and_gradients():
    with pytest.raises(InvalidValue, match="add both"):
        BasisFit(TURNED.parts, [], np.empty(0)).basis(1e-3, "", 1)
