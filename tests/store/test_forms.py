"""Forms of KV: where each number lies in the raw bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from store_kv import FORMS, GEOMETRIES, GQA, geometry, given, numbers, plain, room

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs import BlockShape
from kvkeep.store.kv import forms
from kvkeep.store.kv.forms import Form

LAYOUTS = ("NHD", "HND")


def written(form: Form, kv: Any, tokens: int) -> bytearray:
    raw = bytearray(form.raw_bytes(tokens))
    form.write(kv, memoryview(raw), tokens)
    return raw


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_bytes_are_the_parts_one_after_another(dtype: str, name: str, layout: str) -> None:
    """As the docstring says, and the same for every form that comes in."""
    shape = geometry(name, dtype)
    form, data = Form(shape, layout), numbers(shape, range(5))  # type: ignore[arg-type]
    parts = []
    for layer in given(shape, data, "lists", layout):
        parts += [part.contiguous().view(torch.uint8).numpy().tobytes() for part in layer]
    for came in FORMS:
        kv = given(shape, data, came, layout)
        form.check(kv, 5)
        assert written(form, kv, 5) == b"".join(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_place_of_one_number(layout: str) -> None:
    """Counted out by hand: layer 1, V, token 3, head 1, element 5 of [2, 2, 5, 2, 8]."""
    kv = torch.zeros((2, 2, 5, 2, 8) if layout == "NHD" else (2, 2, 2, 5, 8), dtype=torch.int8)
    part = kv[1, 1]
    (part[3, 1] if layout == "NHD" else part[1, 3])[5] = 7
    raw = written(Form(geometry("gqa", "int8"), layout), kv, 5)  # type: ignore[arg-type]
    inside = (3 * 2 + 1) * 8 + 5 if layout == "NHD" else (1 * 5 + 3) * 8 + 5
    assert raw.index(7) == 3 * 5 * 2 * 8 + inside
    assert sum(raw) == 7


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_blocks_are_read_into_a_part_of_every_form(name: str, layout: str) -> None:
    shape = GEOMETRIES[name]
    form, data = Form(shape, layout), numbers(shape, range(6))  # type: ignore[arg-type]
    raw = memoryview(written(form, given(shape, data, "tuples", layout), 6))
    for goes in FORMS:
        for skip in range(6):
            out = room(shape, 10, goes, layout)
            form.read(raw, 6, form.cut(out, 2, 8 - skip), skip=skip)
            back = plain(shape, out, layout)
            assert np.array_equal(back[2 : 8 - skip], data[skip:])
            assert (back[:2] == 0xA5).all()
            assert (back[8 - skip :] == 0xA5).all()


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("large", [False, True])
def test_new_memory_has_the_form_that_was_asked_for(
    name: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(forms, "_LARGE", 1)
    shape = GEOMETRIES[name]
    for layout in LAYOUTS:
        form = Form(shape, layout)  # type: ignore[arg-type]
        for tuples in (False, True):
            kv = form.empty(7, tuples=tuples)
            form.check_room(kv, 7)
            assert isinstance(kv, torch.Tensor) == (form.blockwise and not tuples)
            data = numbers(shape, range(7))
            form.read(memoryview(written(form, given(shape, data, "tuples", layout), 7)), 7, kv)
            assert np.array_equal(plain(shape, kv, layout), data)
            parts = [kv] if isinstance(kv, torch.Tensor) else [p for layer in kv for p in layer]
            assert all(part.is_contiguous() and not part.requires_grad for part in parts)


def test_what_a_codec_may_know() -> None:
    assert Form(GQA, "HND").block_shape == BlockShape("bfloat16", "HND", ((2, 8),) * 4)
    assert Form(GEOMETRIES["uneven"], "NHD").block_shape.parts == ((2, 8), (2, 4)) * 2
    assert Form(GEOMETRIES["mla"], "NHD").block_shape.parts == ((1, 16),) * 2
    assert Form(GEOMETRIES["rank"], "NHD").block_shape.parts == ((2, 8),) * 4


def test_a_view_that_shares_places_is_no_room() -> None:
    form = Form(GQA, "NHD")
    shared = torch.zeros(2, 2, 1, 2, 8, dtype=torch.bfloat16).expand(2, 2, 3, 2, 8)
    form.check(shared, 3)  # to read from it is all right
    with pytest.raises(InvalidValue, match="strides"):
        form.check_room(shared, 3)
    form.check_room(torch.zeros(2, 2, 1, 2, 8, dtype=torch.bfloat16), 1)
    form.check_room(torch.zeros(2, 2, 0, 2, 8, dtype=torch.bfloat16), 0)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'NDH'"):
        Form(GQA, "NDH")  # type: ignore[arg-type]
