"""Codecs by name and by number."""

from __future__ import annotations

import subprocess
import sys

import pytest
from codec_blocks import KEY, LLAMA, SHAPES

from kvkeep.core.errors import InvalidValue, MissingExtra
from kvkeep.store.codecs import CODECS, BlockShape, codec_of, make_codec

NUMBERS = {"raw": 0, "lossless": 1, "int8": 2, "fp8": 3, "int4": 4}


def test_codec_numbers_never_change():
    """Records on disks contain them: numbers may be added, never reused (5 was `transform`)."""
    made = [make_codec(name, LLAMA) for name in CODECS]
    assert {codec.name: codec.number for codec in made} == NUMBERS
    assert [codec.name for codec in made] == list(CODECS)
    assert [codec.exact for codec in made] == [True, True, False, False, False]


@pytest.mark.parametrize("name", CODECS)
def test_a_number_selects_the_codec(name):
    for key in (None, KEY):
        made = make_codec(name, LLAMA, key)
        found = codec_of(made.number, LLAMA, KEY)
        assert found is not None
        assert (found.name, found.number) == (made.name, made.number)


@pytest.mark.parametrize("number", [-1, 5, 6, 63, 69, 70, 127, 133, 134, 255, 2**31])
def test_unknown_numbers_have_no_codec(number):
    assert codec_of(number, LLAMA, KEY) is None


def test_codecs_without_their_key_or_type_are_none():
    assert codec_of(64, LLAMA) is None
    assert codec_of(2, BlockShape()) is None
    assert codec_of(3, SHAPES["fp8"]) is None
    assert codec_of(66, BlockShape(), KEY) is None


@pytest.mark.parametrize("name", ["", "zstd", "RAW", "raw ", "int3", "zstd:4", "transform", "auto"])
def test_other_names_are_refused(name):
    with pytest.raises(InvalidValue, match="raw, lossless, int8, fp8, int4"):
        make_codec(name, LLAMA)


def test_importing_codecs_needs_neither_torch_nor_the_others():
    code = (
        "import sys; import kvkeep.store.codecs as c; c.make_codec('raw', c.BlockShape());"
        "bad = {'torch', 'numcodecs', 'cryptography', 'zstandard'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "key", "module", "extra"),
    [
        ("lossless", None, "numcodecs", "store"),
        ("int8", None, "torch", "store"),
        ("raw", KEY, "cryptography", "encryption"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, key, module, extra):
    for loaded in [one for one in sys.modules if one.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)

    class Gone:
        @staticmethod
        def find_spec(wanted, path=None, target=None):
            del path, target
            if wanted.partition(".")[0] == module:
                raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)

    monkeypatch.setattr(sys, "meta_path", [Gone, *sys.meta_path])
    with pytest.raises(MissingExtra, match=rf"kvkeep\[{extra}\]"):
        make_codec(name, LLAMA, key)
