"""The digest of weights: what changes it, what does not, and files that mean harm."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvkeep import InvalidValue
from kvkeep.store.identity.files import SPAN_BYTES, SPANS, weights_digest

WHOLE = SPANS * SPAN_BYTES


def tensors(seed=1, **changes):
    random = torch.Generator().manual_seed(seed)
    made = {
        "embed": torch.randn(700, 300, generator=random),  # 840 kB: sampled
        "layers.0.w": torch.randn(64, 64, generator=random).to(torch.bfloat16),
        "layers.1.w": torch.randn(64, 64, generator=random).to(torch.bfloat16),
        "norm": torch.ones(64),
        "steps": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    return {**made, **changes}


def folder_of(path, files):
    path.mkdir()
    for name, content in files.items():
        save_file(content, path / name)
    return path


def raw(path, header, payload=b""):
    """A file of our own making: ``header`` is JSON text, or what becomes it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def index_of(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


# --- what it is ------------------------------------------------------------------------------


def test_it_is_32_hexadecimal_digits_and_the_same_again(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    digest = weights_digest(file)
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    assert weights_digest(str(tmp_path)) == weights_digest(file) == digest


def test_the_format_of_today(tmp_path):
    """Whoever changes the algorithm changes every namespace: then this changes knowingly."""
    payload = bytes(range(256)) * 2
    header = {"a": {"dtype": "U8", "shape": [2, 256], "data_offsets": [0, 512]}}
    file = raw(tmp_path / "model.safetensors", header, payload)
    assert weights_digest(file) == "b1515bec8fe4140674f163712b7f8b2d"
    header = {"a": {"dtype": "U8", "shape": [512 * 1024], "data_offsets": [0, 512 * 1024]}}
    raw(file, header, payload * 1024)
    assert weights_digest(file) == "f99001152dafa6d1c50957fe47040a9f"


def test_a_fine_tune_has_the_same_header_and_another_digest(tmp_path):
    """The reason for all of it: nothing but the payload differs."""
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file(tensors(), one)
    tuned = tensors()
    tuned["embed"] = tuned["embed"] + 1e-4
    save_file(tuned, two)
    length = 8 + int.from_bytes(one.read_bytes()[:8], "little")
    assert one.read_bytes()[:length] == two.read_bytes()[:length]
    assert one.stat().st_size == two.stat().st_size
    assert weights_digest(one) != weights_digest(two)


@pytest.mark.parametrize("name", [name for name in tensors() if name != "none"])
def test_every_tensor_counts(tmp_path, name):
    save_file(tensors(), tmp_path / "a.safetensors")
    changed = tensors()
    changed[name] = changed[name] * 2 + 1
    save_file(changed, tmp_path / "b.safetensors")
    assert weights_digest(tmp_path / "a.safetensors") != weights_digest(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"norm": torch.ones(8, 8)},
        {"norm": torch.ones(64, dtype=torch.int32).view(torch.int32)},
        {"none": torch.empty(4, 0)},
        {"more": torch.empty(0)},
    ],
)
def test_shape_dtype_and_names_count(tmp_path, change):
    save_file(tensors(), tmp_path / "a.safetensors")
    save_file(tensors(**change), tmp_path / "b.safetensors")
    assert weights_digest(tmp_path / "a.safetensors") != weights_digest(tmp_path / "b.safetensors")


def test_names_that_change_places_count(tmp_path):
    """Two layers exchanged have the same bytes under the same names, the other way round."""
    one = tensors()
    two = {**one, "layers.0.w": one["layers.1.w"], "layers.1.w": one["layers.0.w"]}
    save_file(one, tmp_path / "a.safetensors")
    save_file(two, tmp_path / "b.safetensors")
    assert weights_digest(tmp_path / "a.safetensors") != weights_digest(tmp_path / "b.safetensors")


@given(
    size=st.integers(WHOLE + 1, 3 * WHOLE), where=st.sampled_from(["first", "last", "a span of"])
)
@settings(max_examples=12, deadline=None)
def test_the_ends_of_a_large_tensor_are_looked_at(tmp_path_factory, size, where):
    file = tmp_path_factory.mktemp("ends") / "model.safetensors"
    header = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    before = weights_digest(raw(file, header, bytes(size)))
    payload = bytearray(size)
    if where == "a span of":  # as long as the widest gap: some sample lies in it
        payload[size // 3 : size // 3 + size // (SPANS - 1) + 1] = b"\1" * (size // (SPANS - 1) + 1)
    else:
        payload[0 if where == "first" else -1] = 1
    assert weights_digest(raw(file, header, bytes(payload))) != before


def test_one_byte_between_two_samples_is_seen_by_full_alone(tmp_path):
    """What the documentation says is not seen, is not, and what it says helps, does."""
    size = 1 << 22
    header = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    payload = bytearray(size)
    one = raw(tmp_path / "one.safetensors", header, payload)
    payload[SPAN_BYTES + 10] = 1
    two = raw(tmp_path / "two.safetensors", header, payload)
    assert weights_digest(one) == weights_digest(two)
    assert weights_digest(one, full=True) != weights_digest(two, full=True)
    assert weights_digest(one, full=True) != weights_digest(one)


# --- directories -----------------------------------------------------------------------------


def test_shards_and_one_file_give_the_same(tmp_path):
    every = tensors()
    one = folder_of(tmp_path / "one", {"model.safetensors": every})
    first = {name: every[name] for name in ("norm", "embed")}
    second = {name: value for name, value in every.items() if name not in first}
    two = folder_of(tmp_path / "two", {"m-1.safetensors": first, "m-2.safetensors": second})
    assert weights_digest(two) == weights_digest(one)  # without an index, every file
    save_file(tensors(5), two / "consolidated.safetensors")  # a second copy, in no index
    index_of(
        two, dict.fromkeys(first, "m-1.safetensors") | dict.fromkeys(second, "m-2.safetensors")
    )
    assert weights_digest(two) == weights_digest(one)


def test_the_configuration_does_not_count(tmp_path):
    folder = folder_of(tmp_path / "one", {"model.safetensors": tensors()})
    before = weights_digest(folder)
    (folder / "config.json").write_text("{}")
    assert weights_digest(folder) == before


def test_an_adapter_directory(tmp_path):
    lora = {"q.lora_A.weight": torch.randn(8, 64), "q.lora_B.weight": torch.zeros(64, 8)}
    one = folder_of(tmp_path / "one", {"adapter_model.safetensors": lora})
    trained = {**lora, "q.lora_B.weight": torch.full((64, 8), 0.01)}
    two = folder_of(tmp_path / "two", {"adapter_model.safetensors": trained})
    assert weights_digest(one) != weights_digest(two)


def test_links_are_followed_as_in_the_hub_cache(tmp_path):
    blobs = folder_of(tmp_path / "blobs", {"model.safetensors": tensors()})
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blobs / "model.safetensors")
    assert weights_digest(snapshot) == weights_digest(blobs)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "holds no .safetensors"),
        (["optimizer.pt", "training_args.bin"], "holds no .safetensors"),
        (["pytorch_model.bin"], "holds pytorch_model.bin and no model.safetensors"),
        (["model-q4.gguf"], "holds model-q4.gguf and no model.safetensors"),
    ],
)
def test_directories_without_safetensors_are_refused(tmp_path, files, said):
    for name in files:
        (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(InvalidValue, match=said):
        weights_digest(tmp_path)


def test_paths_that_are_no_weights_are_refused(tmp_path):
    with pytest.raises(InvalidValue, match="no such file or directory"):
        weights_digest("meta-llama/Llama-3.1-8B")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(InvalidValue, match="pickled weights are not read"):
        weights_digest(tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidValue, match=r"no such file|null"):
        weights_digest("a\0b")
    with pytest.raises(InvalidValue, match=r"of a path are needed, got Linear.*model_identity"):
        weights_digest(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["extra.safetensors", "pytorch_model.bin"], "pytorch_model.bin"),
        (["adapter_model.safetensors", "pytorch_model.bin"], "pytorch_model.bin"),
        (["model.safetensors", "adapter_model.bin"], "the adapter adapter_model.bin"),
        (["model.safetensors", "pytorch_model.bin"], None),
        (["adapter_model.safetensors", "optimizer.pt"], None),
    ],
)
def test_pickled_weights_that_may_be_loaded_are_refused(tmp_path, names, refused):
    """What a loader takes is decided by names; of what cannot be read, nothing can be said."""
    for name in names:
        if name.endswith(".safetensors"):
            save_file(tensors(), tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"weights")
    if refused is None:
        assert weights_digest(tmp_path) == weights_digest(tmp_path / names[0])
    else:
        with pytest.raises(InvalidValue, match=refused):
            weights_digest(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path):
    folder = folder_of(tmp_path / "two", {"a.safetensors": tensors(), "b.safetensors": tensors()})
    with pytest.raises(InvalidValue, match="so does another file"):
        weights_digest(folder)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "../secret.safetensors"}, "no file beside it"),
        ({"a": "/etc/passwd"}, "no file beside it"),
        ({"a": "sub\\b.safetensors"}, "no file beside it"),
        ({"a": ".."}, "no .safetensors file|no file beside it"),
        ({"a": 7}, "no file beside it"),
        ({"a": "pytorch_model.bin"}, "no .safetensors file"),
        ({"a": "missing.safetensors"}, "cannot read"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_names_other_things_is_refused(tmp_path, weight_map, said):
    with pytest.raises(InvalidValue, match=said):
        weights_digest(index_of(tmp_path, weight_map))


def test_a_tied_head_that_is_stored_all_the_same_does_not_count(tmp_path):
    tied = tensors(**{"embed_tokens.weight": torch.ones(9, 4)})
    save_file(tied, tmp_path / "model.safetensors")
    before = weights_digest(tmp_path)
    save_file({**tied, "lm_head.weight": torch.ones(9, 4)}, tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) == before
    save_file({**tied, "lm_head.weight": torch.zeros(9, 4)}, tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != before  # one of its own does


# --- files that mean harm --------------------------------------------------------------------

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff{}", "can't decode"),
        (b"[]", "its header is list"),
        (b"[" * 200_000, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": 1, "a": 2}', "twice"),
        ({"a": 7}, "not described"),
        ({"a": {"dtype": "F32"}}, "not described"),
        ({"a": {**GOOD, "dtype": 7}}, "not described"),
        ({"a": {**GOOD, "shape": "2"}}, "not described"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "not described"),
        ({"a": {**GOOD, "data_offsets": [0.0, 8.0]}}, "not described"),
        ({"a": {**GOOD, "shape": [-2]}}, "no shape of whole numbers"),
        ({"a": {**GOOD, "shape": [2.0]}}, "no shape of whole numbers"),
        ({"a": {**GOOD, "shape": [1 << 70]}}, "no shape of whole numbers"),
        ({"a": {**GOOD, "shape": [1] * 65}}, "lies outside|dimensions"),
        ({"a": {**GOOD, "shape": [3]}}, "in 8 bytes"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, "outside of the file"),
        ({"a": {**GOOD, "data_offsets": [-8, 0]}}, "outside of the file"),
        ({"a": {**GOOD, "data_offsets": [0, 1 << 62]}}, "outside of the file"),
        ({"a": GOOD, "b": GOOD}, "where the tensor before ends"),
        ({"a": {**GOOD, "shape": [1], "data_offsets": [0, 4]}}, "has 8 for them"),
        ({"a": {**GOOD, "shape": [1], "data_offsets": [4, 8]}}, "where the tensor before ends"),
        ({}, "has 8 for them"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header, said):
    file = raw(tmp_path / "model.safetensors", header, b"12345678")
    with pytest.raises(InvalidValue, match=said):
        weights_digest(file)


@pytest.mark.parametrize("length", [9, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file_takes_no_memory(tmp_path, length):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"12345678")
    with pytest.raises(InvalidValue, match="its header would have"):
        weights_digest(file)


@pytest.mark.parametrize("size", range(8))
def test_files_shorter_than_a_length_are_refused(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(InvalidValue, match=f"it has {size} bytes"):
        weights_digest(tmp_path)


def test_a_huge_file_that_is_all_hole_is_refused_at_its_header(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 200_000_000))
        opened.truncate(1 << 33)
    with pytest.raises(InvalidValue, match="its header would have"):
        weights_digest(file)


def test_a_dtype_of_the_future_is_taken(tmp_path):
    header = {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    assert weights_digest(raw(tmp_path / "model.safetensors", header, b"abc"))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_file_crashes_it(tmp_path_factory, data):
    """Bytes flipped, cut and put in: a digest, or InvalidValue."""
    file = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    header = {"a": GOOD, "b": {"dtype": "I8", "shape": [1, 3], "data_offsets": [8, 11]}}
    content = bytearray(raw(file, header, b"12345678abc").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 9))]
            case "insert":
                content[at:at] = data.draw(st.sampled_from([b"9", b'"', b"[", b"{}", b"-", b"\0"]))
        if not content:
            break
    file.write_bytes(content)
    try:
        digest = weights_digest(file)
    except InvalidValue:
        return
    assert len(digest) == 32
