from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES, KVGeometry, normalise_dtype, parse_bytes

KIB = 1024
LLAMA_8B = KVGeometry(layers=32, kv_heads=8, head_dim=128)
LLAMA_70B = KVGeometry(layers=80, kv_heads=8, head_dim=128)
QWEN_7B = KVGeometry(layers=28, kv_heads=4, head_dim=128)
DEEPSEEK_V3 = KVGeometry(61, 1, 576, latent_dim=512)


# Published figures: bytes a token in bfloat16.
@pytest.mark.parametrize(
    ("geometry", "wanted"),
    [
        (LLAMA_8B, 128 * KIB),
        (LLAMA_70B, 320 * KIB),
        (replace(LLAMA_70B, tp=8), 40 * KIB),
        (QWEN_7B, 56 * KIB),
        (DEEPSEEK_V3, 70272),
    ],
)
def test_published_figures(geometry: KVGeometry, wanted: int) -> None:
    assert geometry.bytes_per_token == wanted
    assert geometry.bytes_per_page(16) == 16 * wanted


def test_deepseek_needs_68_6_kib_a_token() -> None:
    assert round(DEEPSEEK_V3.bytes_per_token / KIB, 1) == 68.6


def test_what_a_card_holds() -> None:
    assert LLAMA_8B.pages_in("24GiB", 16) == 12288
    assert LLAMA_8B.pages_in(24 * 2**30, 16) == 12288


@pytest.mark.parametrize(("dtype", "size"), DTYPES.items())
def test_bytes_follow_the_dtype(dtype: str, size: int) -> None:
    assert replace(LLAMA_8B, dtype=dtype).bytes_per_token == 32 * 8 * 256 * size


def test_values_may_be_narrower_than_keys() -> None:
    geometry = KVGeometry(2, 4, 192, "fp16", value_dim=128)
    assert geometry.bytes_per_token == 2 * 4 * (192 + 128) * 2


def test_a_latent_is_stored_once_and_serves_as_value() -> None:
    assert (DEEPSEEK_V3.kv_heads, DEEPSEEK_V3.head_dim) == (1, 576)
    assert (DEEPSEEK_V3.latent_dim, DEEPSEEK_V3.value_dim) == (512, 512)


def test_windows_are_recorded_and_lower_no_figure() -> None:
    slides = KVGeometry(3, 8, 128, windows=[1024, None, 1024])
    assert slides.windows == (1024, None, 1024)
    assert slides.bytes_per_token == KVGeometry(3, 8, 128).bytes_per_token
    assert LLAMA_8B.windows == (None,) * 32


@pytest.mark.parametrize(
    ("heads", "tp", "held"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 4, 1), (6, 3, 2)]
)
def test_ranks_divide_heads_or_repeat_them(heads: int, tp: int, held: int) -> None:
    whole = KVGeometry(4, heads, 64)
    rank = replace(whole, tp=tp)
    assert rank.rank_heads == held
    assert rank.bytes_per_token * heads == whole.bytes_per_token * held
    assert rank == KVGeometry.of(whole.groups, tp=tp)
    assert replace(rank, tp=1) == whole


@pytest.mark.parametrize(("heads", "tp"), [(8, 3), (8, 12), (6, 4), (2, 3)])
def test_ranks_that_cannot_share_the_heads(heads: int, tp: int) -> None:
    with pytest.raises(InvalidValue, match=f"tp is {tp} and the model has {heads} KV heads"):
        KVGeometry(4, heads, 64, tp=tp)


def test_every_rank_holds_the_whole_latent() -> None:
    assert replace(DEEPSEEK_V3, tp=8).bytes_per_token == DEEPSEEK_V3.bytes_per_token
    assert replace(DEEPSEEK_V3, tp=3).rank_heads == 1


NOT_COUNTS = [0, -1, 1.0, True, float("nan"), "8", None]


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "tp"])
@pytest.mark.parametrize("wrong", NOT_COUNTS)
def test_a_wrong_number_is_named(name: str, wrong: object) -> None:
    arguments: dict[str, object] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "tp": 1, name: wrong}
    with pytest.raises(InvalidValue, match=f"^{name} is {wrong!r}; a whole number"):
        KVGeometry(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["value_dim", "latent_dim"])
@pytest.mark.parametrize("wrong", [wrong for wrong in NOT_COUNTS if wrong is not None])
def test_a_wrong_width_is_named(name: str, wrong: object) -> None:
    with pytest.raises(InvalidValue, match=f"^{name} is {wrong!r}; a whole number"):
        KVGeometry(2, 1, 8, **{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_a_page_size_is_a_whole_number(wrong: object) -> None:
    with pytest.raises(InvalidValue, match=r"^page_size is"):
        LLAMA_8B.bytes_per_page(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"^page_size is"):
        LLAMA_8B.pages_in("24GiB", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_heads": 2, "latent_dim": 4}, "it must be 1"),
        ({"latent_dim": 9}, "cannot be shorter"),
        ({"latent_dim": 4, "value_dim": 8}, "leave value_dim out"),
        ({"windows": [4]}, "1 windows are given for 2 layers"),
        ({"windows": []}, "0 windows are given for 2 layers"),
        ({"windows": [4, None, 4]}, "3 windows are given for 2 layers"),
        ({"windows": [4, 0]}, "the window of layer 1 is 0"),
        ({"windows": [True, 4]}, "the window of layer 0 is True"),
        ({"dtype": "float64"}, "dtype is 'float64'; known are float32"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        KVGeometry(**{"layers": 2, "kv_heads": 1, "head_dim": 8, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["2MB", "0", 0, 2**21 - 1])
def test_a_budget_without_a_page_is_refused(budget: str | int) -> None:
    with pytest.raises(InvalidValue, match=r"holds no page; a page of 16 tokens needs 2 MiB"):
        LLAMA_8B.pages_in(budget, 16)


@pytest.mark.parametrize("budget", ["4XB", -1, 4e9, float("nan"), True, None])
def test_a_budget_that_is_none_is_refused(budget: object) -> None:
    with pytest.raises(InvalidValue, match="amount"):
        LLAMA_8B.pages_in(budget, 16)  # type: ignore[arg-type]


geometries = st.builds(
    KVGeometry,
    st.integers(1, 128),
    st.sampled_from([1, 2, 4, 8, 32]),
    st.integers(1, 512),
    st.sampled_from(sorted(DTYPES)),
    value_dim=st.none() | st.integers(1, 512),
    tp=st.sampled_from([1, 2, 4, 64]),
)


@given(geometries, st.integers(1, 512), st.integers(1, 2**45))
def test_the_pages_of_a_budget_are_as_many_as_fit(
    geometry: KVGeometry, page_size: int, budget: int
) -> None:
    page = geometry.bytes_per_page(page_size)
    if budget < page:
        with pytest.raises(InvalidValue, match="holds no page"):
            geometry.pages_in(budget, page_size)
        return
    pages = geometry.pages_in(budget, page_size)
    assert pages * page <= budget < (pages + 1) * page


@given(geometries, st.integers(1, 64), st.decimals(1, 1000, places=2))
def test_a_budget_in_words_is_the_budget_in_bytes(
    geometry: KVGeometry, page_size: int, amount: object
) -> None:
    text = f"{amount} GiB"
    assert geometry.pages_in(text, page_size) == geometry.pages_in(parse_bytes(text), page_size)


@given(geometries)
def test_a_geometry_is_a_value(geometry: KVGeometry) -> None:
    for twin in (replace(geometry), copy.deepcopy(geometry), pickle.loads(pickle.dumps(geometry))):
        assert twin == geometry
        assert hash(twin) == hash(geometry)


def test_a_geometry_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        LLAMA_8B.layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "spellings"),
    {
        "float32": ["float32", "fp32", "torch.float32", "Float", "f32"],
        "float16": ["half", "FP16", "torch.float16"],
        "bfloat16": ["bf16", "BF16", " bfloat16 ", "torch.bfloat16"],
        "float8_e4m3fn": ["fp8", "fp8_e4m3", "float8_e4m3", "torch.float8_e4m3fn"],
        "float8_e5m2": ["fp8_e5m2", "float8_e5m2"],
        "int8": ["int8", "torch.int8"],
    }.items(),
)
def test_spellings_of_a_dtype(name: str, spellings: list[str]) -> None:
    assert {normalise_dtype(spelling) for spelling in spellings} == {name}
    assert KVGeometry(1, 1, 1, spellings[0]).dtype == name


@pytest.mark.parametrize("wrong", ["", "fp4", "float64", "int4", "auto", 16, None, True])
def test_other_dtypes_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue, match="dtype is"):
        normalise_dtype(wrong)


def test_every_dtype_is_one_that_torch_has_in_that_size() -> None:
    torch = pytest.importorskip("torch")
    for name, size in DTYPES.items():
        assert getattr(torch, name).itemsize == size
        assert normalise_dtype(getattr(torch, name)) == name


def test_geometry_needs_neither_torch_nor_numpy() -> None:
    # kvkeep itself imports NumPy, so a stand-in package of the same name is put in its place.
    code = (
        "import sys, types, pathlib, importlib.util\n"
        "root = pathlib.Path(importlib.util.find_spec('kvkeep').origin).parent\n"
        "package = types.ModuleType('kvkeep'); package.__path__ = [str(root)]\n"
        "sys.modules['kvkeep'] = package\n"
        "sys.modules['transformers'] = None\n"
        "from kvkeep.core.geometry import KVGeometry\n"
        "KVGeometry.from_config(dict(model_type='gpt2', n_layer=2, n_head=2, n_embd=8))\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
