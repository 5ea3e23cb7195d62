"""Weights in safetensors files: which files a model has, and the tensors in their headers.

A file is an unsigned 64-bit length, a JSON header of that many bytes (tensor → dtype, shape, first
and last offset), and the tensors' bytes. It is read here by seeking, without mapping the file:
https://huggingface.co/docs/safetensors#format

Files may come from anywhere, so a header is checked before it is used: its length before memory is
allocated, its JSON, and that its tensors fill the rest of the file without gap or overlap.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Spans", "Weights", "find_files", "read_header"]

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
