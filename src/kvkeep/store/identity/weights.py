"""`weights_digest`: a digest of the weights in files, as 32 hexadecimal characters.

`kvkeep.store.identity` includes it, with everything else that decides the numbers of KV: use that
for a namespace. The digest covers the name, dtype and shape of each tensor, and samples of its
bytes. It does not depend on ``config.json``, the order of tensors, or their division among files.

Samples are `SPANS` spans of `SPAN_BYTES`, spread evenly over a tensor from its first to its last
byte; tensors of up to 256 KiB are read whole. Training, merging an adapter and quantising change
nearly every element and are seen. A change to a few elements between two spans is not seen: one row
of an embedding, one element edited by hand. ``full=True`` reads every byte.

A file is an unsigned 64-bit length, a JSON header of that many bytes (tensor → dtype, shape, first
and last offset), and the tensors' bytes (https://huggingface.co/docs/safetensors#format). It is
read by seeking. Files may come from anywhere, so a header is checked before it is used: its length
before memory is allocated, its JSON, and that its tensors fill the rest without gap or overlap.

    model directory ─▶ index of shards, or *.safetensors ─▶ headers ─▶ tensors ─▶ samples ─▶ digest
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["SPANS", "SPAN_BYTES", "find_files", "weights_digest"]

SPANS = 64
SPAN_BYTES = 4096
_WHOLE = SPANS * SPAN_BYTES  # tensors of up to this many bytes are read whole
_MAGIC = b"kvkeep weights 1\n"
_DIGEST_BYTES = 16
_READERS = 8  # threads: a cold disk answers many seeks at once
# Output layers that many models tie to their embedding; only some files hold the tied tensor.
_HEADS = ("lm_head.weight", "embed_out.weight")

_LENGTH: Final = struct.Struct("<Q")
_HEADER_MAX: Final = 100_000_000  # bytes; the limit of the format's own library
_INDEX_MAX: Final = 100_000_000
# Bits of an element. The sizes of newer types are not checked, only their offsets.
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_OTHERS: Final = {".bin", ".pt", ".pth", ".gguf"}
# Files that a trainer leaves beside a model; no loader takes them for weights.
_OF_TRAINING: Final = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")

Spans = list[tuple[int, int]]
"""``(offset, bytes)`` in a tensor's bytes, in order."""


@dataclass(frozen=True)
class Weights:
    """A tensor in a file; ``read`` yields the bytes of spans, one after another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[Spans], Iterable[bytes | memoryview]]


def weights_digest(source: str | os.PathLike[str], *, full: bool = False) -> str:
    """Return a digest of the weights in files: 32 hexadecimal digits.

    ``source`` is a model directory, a directory with an adapter (LoRA), or one safetensors file. Of
    a model directory that also holds an adapter, only the model's weights count. ``full`` reads
    every byte, not samples; the two give different digests of large tensors.

    Cost: `SPANS` seeks a large tensor, from 8 threads: about 46,000 reads of 4 KiB for a model of
    70B parameters. Thread safety: any.

    Raises:
        InvalidValue: there is no such path; it has no safetensors file; it has pickled weights that
            may be loaded instead of them (pickles are never read); or a file is damaged.
    """
    if not isinstance(source, str | os.PathLike):
        raise InvalidValue(
            f"the weights of a path are needed, got {type(source).__name__}; for a loaded module, "
            "use kvkeep.store.model_identity"
        )
    return _digest(_of_files(find_files(Path(source))), full)


def _digest(tensors: list[Weights], full: bool) -> str:
    """Return the digest of all tensors, in the order of their names."""
    tensors.sort(key=lambda tensor: tensor.name)
    with ThreadPoolExecutor(_READERS) as readers:
        marks = list(readers.map(lambda tensor: _mark(tensor, full), tensors))
    seen = {mark for tensor, mark in zip(tensors, marks, strict=True) if not _is_head(tensor)}
    whole = hashlib.blake2b(_MAGIC, digest_size=_DIGEST_BYTES)
    for tensor, mark in zip(tensors, marks, strict=True):
        if not (_is_head(tensor) and mark in seen):  # a tied tensor may be stored or not
            name = tensor.name.encode("utf-8", "surrogatepass")
            whole.update(b"%d:%s=%s" % (len(name), name, mark))
    return whole.hexdigest()


def _mark(tensor: Weights, full: bool) -> bytes:
    """Return a digest of one tensor without its name."""
    shape = ",".join(map(str, tensor.shape))
    mark = hashlib.blake2b(
        f"{tensor.dtype}[{shape}]{'full' if full else ''}\n".encode(), digest_size=32
    )
    for piece in tensor.read(_spans(tensor.num_bytes, full)):
        mark.update(piece)
    return mark.digest()


def _is_head(tensor: Weights) -> bool:
    return tensor.name.endswith(_HEADS)


def _spans(num_bytes: int, full: bool) -> Spans:
    """Return the spans of a tensor to read: the first bytes, the last, and evenly between."""
    if full:
        step = 1 << 20
        return [(at, min(step, num_bytes - at)) for at in range(0, num_bytes, step)]
    if num_bytes <= _WHOLE:
        return [(0, num_bytes)]
    last = num_bytes - SPAN_BYTES
    return [(last * span // (SPANS - 1), SPAN_BYTES) for span in range(SPANS)]


def _of_files(files: list[Path]) -> list[Weights]:
    """Return the tensors of all ``files``; a name must not occur twice."""
    found: dict[str, Weights] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in found:
                raise InvalidValue(
                    f"{file} holds {tensor.name!r}, and so does another file beside it; a model "
                    "directory with one model, or the path of one file, is needed"
                )
            found[tensor.name] = tensor
    return list(found.values())


def find_files(path: Path) -> list[Path]:
    """Return the safetensors files of the model at ``path``, a directory or one file, sorted.

    Raises:
        InvalidValue: there are none, or an index names files elsewhere.
    """
    try:
        if path.is_dir():
            return _in_folder(path)
        there = path.is_file()
    except InvalidValue:
        raise
    except (OSError, ValueError) as error:  # a ValueError is a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise InvalidValue(f"cannot read {path}: {why}") from error
    if not there:
        raise InvalidValue(
            f"no weights at {path}: there is no such file or directory; a local model directory "
            "or one .safetensors file is needed"
        )
    if path.suffix != ".safetensors":
        raise InvalidValue(
            f"{path} is no .safetensors file; pickled weights are not read, since that can run "
            "code: load the model and save it again with save_pretrained"
        )
    return [path]


def _in_folder(path: Path) -> list[Path]:
    """Return the files that Transformers loads: one file, an index, an adapter, else all files.

    An adapter or other files beside a model are not the model's own weights and are left out.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    adapter = path / "adapter_model.safetensors"
    pickled = sorted(
        file.name
        for file in path.iterdir()
        if file.suffix in _OTHERS and not file.name.startswith(_OF_TRAINING)
    )
    for name in pickled:
        if name.startswith("adapter_model") and not adapter.is_file():
            raise InvalidValue(
                f"{path} holds the adapter {name}, which is loaded with the model; pickled weights "
                "are not read: load the adapter and save it again with save_pretrained"
            )
    if single.is_file():
        return [single]
    if index.is_file():
        return [path / name for name in sorted(_shards(index))]
    if pickled:
        raise InvalidValue(
            f"{path} holds {pickled[0]} and no model.safetensors: these pickled weights may be "
            "loaded, and are not read here; load the model and save it again with save_pretrained"
        )
    if adapter.is_file():
        return [adapter]
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not files:
        raise InvalidValue(
            f"{path} holds no .safetensors file; a model or adapter directory with its weights as "
            "safetensors is needed"
        )
    return files


def read_header(file: Path) -> list[Weights]:
    """Return the tensors of ``file``, from its header.

    Raises:
        InvalidValue: the file cannot be read, or is no whole safetensors file.
    """
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            prefix = opened.read(_LENGTH.size)
            if len(prefix) < _LENGTH.size:
                _refuse(file, f"it has {size} bytes, and a header alone takes more")
            (length,) = _LENGTH.unpack(prefix)
            if length > min(_HEADER_MAX, size - _LENGTH.size):
                _refuse(file, f"its header would have {length} bytes, of {size} in all")
            header = opened.read(length)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror or error}") from error
    payload = size - _LENGTH.size - length
    return list(_tensors(file, _parse(file, header), _LENGTH.size + length, payload))


def _tensors(file: Path, header: dict[str, Any], start: int, payload: int) -> Iterator[Weights]:
    entries = [
        (*_entry(file, name, entry, payload), name)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: entry[:2])
    reached = 0
    for begin, end, dtype, shape, name in entries:
        if begin != reached:
            _refuse(file, f"{name!r} begins at {begin}, where the tensor before ends at {reached}")
        reached = end
        yield Weights(name, dtype, shape, end - begin, _reader(file, start + begin))
    if reached != payload:
        _refuse(file, f"its tensors have {reached} bytes and the file has {payload} for them")


def _entry(
    file: Path, name: str, entry: object, payload: int
) -> tuple[int, int, str, tuple[int, ...]]:
    """Return one tensor's first offset, last offset, dtype and shape, or refuse the file."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            _refuse(file, f"{name!r} is not described by dtype, shape and two data_offsets")
    if not all(type(length) is int and 0 <= length < 1 << 63 for length in shape):
        _refuse(file, f"{name!r} has no shape of whole numbers")
    if len(shape) > 64 or not 0 <= begin <= end <= payload:
        _refuse(file, f"{name!r} lies outside of the file, at {begin} … {end} of {payload} bytes")
    bits = _BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        _refuse(file, f"{name!r} is {dtype} of shape {shape}, in {end - begin} bytes")
    return begin, end, dtype, tuple(shape)


def _reader(file: Path, start: int) -> Callable[[Spans], Iterable[bytes]]:
    """Return a reader of spans from ``start`` on. It opens ``file`` anew, for any thread."""

    def read(spans: Spans) -> Iterator[bytes]:
        try:
            with file.open("rb", buffering=0) as opened:
                for at, size in spans:
                    opened.seek(start + at)
                    piece = opened.read(size)
                    if len(piece) != size:
                        _refuse(file, "it became shorter while it was read")
                    yield piece
        except OSError as error:
            raise InvalidValue(f"cannot read {file}: {error.strerror or error}") from error

    return read


def _shards(index: Path) -> set[str]:
    """Return the files that an index of shards names, all of them beside it."""
    try:
        if index.stat().st_size > _INDEX_MAX:
            _refuse(index, f"an index has at most {_INDEX_MAX} bytes")
        content = index.read_bytes()
    except OSError as error:
        raise InvalidValue(f"cannot read {index}: {error.strerror or error}") from error
    names = _parse(index, content).get("weight_map")
    if not isinstance(names, dict) or not names:
        _refuse(index, "it has no weight_map")
    shards = set()
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or "\0" in name:
            _refuse(index, f"it names {name!r}, which is no file beside it")
        if not name.endswith(".safetensors"):
            _refuse(index, f"it names {name!r}, which is no .safetensors file")
        shards.add(name)
    return shards


def _parse(file: Path, content: bytes) -> dict[str, Any]:
    """Return a JSON object in which no key occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            _refuse(file, "a key comes twice in its header")
        return fields

    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=once)
    except InvalidValue:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{file} does not describe weights: {error}") from error
    if not isinstance(parsed, dict):
        _refuse(file, f"its header is {type(parsed).__name__}, not an object")
    return parsed


def _refuse(file: Path, why: str) -> NoReturn:
    raise InvalidValue(f"{file} does not describe weights, or is damaged: {why}")
