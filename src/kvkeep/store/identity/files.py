"""Digests of models in files: `weights_digest`, and `files_identity` of all files that decide KV.

The digest of weights covers the name, dtype and shape of each tensor, and samples of its bytes. It
does not depend on ``config.json``, the order of tensors, or their division among files.

Samples are `SPANS` spans of `SPAN_BYTES`, spread evenly over a tensor from its first to its last
byte; tensors of up to 256 KiB are read whole. Training, merging an adapter and quantising change
nearly every element and are seen. A change to a few elements between two spans is not seen: one row
of an embedding, one element edited by hand. ``full=True`` reads every byte.

A file is an unsigned 64-bit length, a JSON header of that many bytes (tensor → dtype, shape, first
and last offset), and the tensors' bytes (https://huggingface.co/docs/safetensors#format). It is
read by seeking. Files may come from anywhere, so a header is checked before it is used: its length
before memory is allocated, its JSON, and that its tensors fill the rest without gap or overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SPANS", "SPAN_BYTES", "files_identity", "weights_digest"]

SPANS = 64
SPAN_BYTES = 4096
_WHOLE = SPANS * SPAN_BYTES  # tensors of up to this many bytes are read whole
_MAGIC = b"kvkeep weights 1\n"
_FILES_MAGIC: Final = b"kvkeep model files 1\n"
_DIGEST_BYTES = 16
_READERS = 8  # threads: a cold disk answers many seeks at once
_CHUNK: Final = 1 << 20  # bytes of one read, where every byte is read
# Output layers that many models tie to their embedding; only some files hold the tied tensor.
_HEADS = ("lm_head.weight", "embed_out.weight")

_LENGTH: Final = struct.Struct("<Q")
_JSON_MAX: Final = 100_000_000  # bytes of a header, the limit of the format's library, or an index
# Bits of an element. The sizes of newer types are not checked, only their offsets.
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_WEIGHTS: Final = ".safetensors"
_PICKLED: Final = {".bin", ".pt", ".pth", ".gguf"}
# Files that a trainer leaves beside a model; no loader takes them for weights.
_OF_TRAINING: Final = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
_DECIDING: Final = {_WEIGHTS, ".json", ".py", ".yaml", ".yml"}
_NEUTRAL: Final = {
    "added_tokens.json", "chat_template.json", "generation_config.json", "special_tokens_map.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.json",
}  # fmt: skip


def files_identity(path: Path, *, full: bool) -> str:
    """Return a digest of ``path``, a model directory or one safetensors file: 64 hex digits.

    Raises:
        InvalidValue: as `weights_digest`; or a file cannot be read.
    """
    whole = hashlib.sha256(_FILES_MAGIC + weights_digest(path, full=full).encode() + b"\n")
    beside = set(path.iterdir()) - set(_find_files(path)) if path.is_dir() else set()
    for file in sorted(beside):
        if not file.is_file() or not _decides(file):
            continue
        if file.suffix == _WEIGHTS:
            content = weights_digest(file, full=full)
        else:
            with _readable(file), file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
        whole.update(f"{len(file.name)}:{file.name}={content}\n".encode(errors="surrogatepass"))
    return whole.hexdigest()


def _decides(file: Path) -> bool:
    """Return whether a file beside a model may change its KV."""
    neutral = file.name in _NEUTRAL or file.name.endswith(".index.json")
    return file.suffix in _DECIDING and not neutral


def weights_digest(source: str | os.PathLike[str], *, full: bool = False) -> str:
    """Return a digest of the weights in files: 32 hexadecimal digits.

    ``source`` is a model directory, a directory with an adapter (LoRA), or one safetensors file. Of
    a model directory that also holds an adapter, only the model's weights count. ``full`` reads
    every byte, not samples; the two give different digests of large tensors.
    `kvkeep.store.model_identity` includes the digest, with everything else that decides the numbers
    of KV: use that for a namespace.

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
    by_name: dict[str, _Tensor] = {}
    for file in _find_files(Path(source)):
        for tensor in _read_header(file):
            if tensor.name in by_name:
                raise InvalidValue(
                    f"{file} holds {tensor.name!r}, and so does another file beside it; a model "
                    "directory with one model, or the path of one file, is needed"
                )
            by_name[tensor.name] = tensor
    names = sorted(by_name)
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(lambda name: _digest(by_name[name], full), names))
    body = {mark for name, mark in zip(names, digests, strict=True) if not name.endswith(_HEADS)}
    whole = hashlib.blake2b(_MAGIC, digest_size=_DIGEST_BYTES)
    for name, mark in zip(names, digests, strict=True):
        if not (name.endswith(_HEADS) and mark in body):  # a tied tensor may be stored or not
            encoded = name.encode("utf-8", "surrogatepass")
            whole.update(b"%d:%s=%s" % (len(encoded), encoded, mark))
    return whole.hexdigest()


class _Tensor(NamedTuple):
    """A tensor in a file, ``begin`` bytes after the file's start."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def _digest(tensor: _Tensor, full: bool) -> bytes:
    """Return a digest of one tensor without its name. Opens the file anew, for any thread."""
    shape = ",".join(map(str, tensor.shape))
    text = f"{tensor.dtype}[{shape}]{'full' if full else ''}\n"
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    with _readable(tensor.file), tensor.file.open("rb", buffering=0) as opened:
        for offset, size in _spans(tensor.num_bytes, full):
            opened.seek(tensor.begin + offset)
            piece = opened.read(size)
            if len(piece) != size:
                _refuse(tensor.file, "it became shorter while it was read")
            digest.update(piece)
    return digest.digest()


def _spans(num_bytes: int, full: bool) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the spans to read: the first bytes, the last, evenly between."""
    if full:
        return [(at, min(_CHUNK, num_bytes - at)) for at in range(0, num_bytes, _CHUNK)]
    if num_bytes <= _WHOLE:
        return [(0, num_bytes)]
    last = num_bytes - SPAN_BYTES
    return [(last * span // (SPANS - 1), SPAN_BYTES) for span in range(SPANS)]


# --- which files, and which tensors are in them --------------------------------------------------


def _find_files(path: Path) -> list[Path]:
    """Return the safetensors files of the model at ``path``, a directory or one file, sorted.

    Of a directory, those that Transformers loads: one file, an index, an adapter, else all files.
    An adapter or other files beside a model are not the model's own weights and are left out.

    Raises:
        InvalidValue: there are none, or an index names files elsewhere.
    """
    with _readable(path):
        if path.is_dir():
            return _in_folder(path)
        if not path.is_file():
            raise InvalidValue(
                f"no weights at {path}: there is no such file or directory; a local model "
                "directory or one .safetensors file is needed"
            )
    if path.suffix != _WEIGHTS:
        raise InvalidValue(
            f"{path} is no .safetensors file; pickled weights are not read, since that can run "
            "code: load the model and save it again with save_pretrained"
        )
    return [path]


def _in_folder(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    adapter = path / "adapter_model.safetensors"
    pickled = sorted(
        file.name
        for file in path.iterdir()
        if file.suffix in _PICKLED and not file.name.startswith(_OF_TRAINING)
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
    files = sorted(file for file in path.glob(f"*{_WEIGHTS}") if file.is_file())
    if not files:
        raise InvalidValue(
            f"{path} holds no .safetensors file; a model or adapter directory with its weights as "
            "safetensors is needed"
        )
    return files


def _shards(index: Path) -> set[str]:
    """Return the files that an index of shards names, all of them beside it."""
    with _readable(index):
        if index.stat().st_size > _JSON_MAX:
            _refuse(index, f"an index has at most {_JSON_MAX} bytes")
        content = index.read_bytes()
    names = _parse(index, content).get("weight_map")
    if not isinstance(names, dict) or not names:
        _refuse(index, "it has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or "\0" in name:
            _refuse(index, f"it names {name!r}, which is no file beside it")
        if not name.endswith(_WEIGHTS):
            _refuse(index, f"it names {name!r}, which is no .safetensors file")
    return set(names.values())


def _read_header(file: Path) -> list[_Tensor]:
    """Return the tensors of ``file``, which lie without a gap from its header to its end."""
    with _readable(file), file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        prefix = opened.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            _refuse(file, f"it has {size} bytes, and a header alone takes more")
        (length,) = _LENGTH.unpack(prefix)
        if length > min(_JSON_MAX, size - _LENGTH.size):
            _refuse(file, f"its header would have {length} bytes, of {size} in all")
        header = _parse(file, opened.read(length))
    header.pop("__metadata__", None)
    start = _LENGTH.size + length
    tensors = [_entry(file, name, entry, start, size) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.num_bytes))
    reached = start
    for tensor in tensors:
        if tensor.begin != reached:
            _refuse(
                file,
                f"{tensor.name!r} begins at {tensor.begin - start}, where the tensor before ends "
                f"at {reached - start}",
            )
        reached += tensor.num_bytes
    if reached != size:
        _refuse(file, f"its tensors have {reached - start} bytes and the file has {size - start} "
                "for them")  # fmt: skip
    return tensors


def _entry(file: Path, name: str, entry: object, start: int, size: int) -> _Tensor:
    """Return a tensor of a file with ``size`` bytes, the payload beginning at ``start``."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            _refuse(file, f"{name!r} is not described by dtype, shape and two data_offsets")
    if not all(type(length) is int and 0 <= length < 1 << 63 for length in shape):
        _refuse(file, f"{name!r} has no shape of whole numbers")
    if len(shape) > 64 or not 0 <= begin <= end <= size - start:
        place = f"{begin} … {end} of {size - start} bytes"
        _refuse(file, f"{name!r} lies outside of the file, at {place}")
    bits = _BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        _refuse(file, f"{name!r} is {dtype} of shape {shape}, in {end - begin} bytes")
    return _Tensor(file, name, dtype, tuple(shape), start + begin, end - begin)


def _parse(file: Path, content: bytes) -> dict[str, Any]:
    """Return a JSON object in which no key occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            _refuse(file, "a key comes twice in its header")
        return fields

    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidValue):
            raise
        _refuse(file, str(error))
    if not isinstance(parsed, dict):
        _refuse(file, f"its header is {type(parsed).__name__}, not an object")
    return parsed


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn errors of the operating system into `InvalidValue`."""
    try:
        yield
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror or error}") from error


def _refuse(file: Path, why: str) -> NoReturn:
    raise InvalidValue(f"{file} does not describe weights, or is damaged: {why}")
