"""`weights_digest`: which weights a model has, as 32 hexadecimal characters.

KV is only right for the weights that computed it, and a fine-tune has the name, the configuration
and the tensor shapes of what it was tuned from. So the digest is made of the tensors: the name,
dtype and shape of each, and samples of its bytes. What it is not made of: ``config.json`` (the
geometry and the model's name are parts of the namespace themselves), the order of tensors, and how
they are divided among files.

Samples are `SPANS` spans of `SPAN_BYTES` spread evenly over a tensor, its first and last bytes
among them; up to 256 KiB are read whole. Training, merging an adapter and quantising change nearly
every element of a tensor, or of a head's rows, and are seen. Not seen is a change to a few elements
between two spans: one row of an embedding, one element edited by hand. ``full=True`` reads every
byte, for those who do that.

    model directory ─▶ index of shards, or *.safetensors ─▶ headers ─┐
    torch.nn.Module ─▶ state_dict ───────────────────────────────────┴▶ tensors ─▶ samples ─▶ digest

The same digest comes out of a directory and of the model loaded from it where Transformers loads
the tensors as they are: same names, and ``dtype`` that of the files. It differs where loading
converts (another dtype, fused experts, renamed layers): then name one revision for both by hand.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidValue, require
from kvkeep.store.weights_cache import FileIdentity, WeightsCache
from kvkeep.store.weights_files import Weights, find_files, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from kvkeep.store.weights_files import Spans

    WeightsLike = str | os.PathLike[str] | torch.nn.Module

__all__ = ["SPANS", "SPAN_BYTES", "weights_digest"]

SPANS = 64
SPAN_BYTES = 4096
_WHOLE = SPANS * SPAN_BYTES  # a tensor of at most so many bytes is read whole
_MAGIC = b"kvkeep weights 1\n"
_DIGEST_BYTES = 16
_READERS = 8  # threads: a cold disk answers many seeks at once
# Output layers that many models tie to their embedding; some files hold the tied one, some do not.
_HEADS = ("lm_head.weight", "embed_out.weight")
# What a torch dtype is called in safetensors.
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def weights_digest(source: WeightsLike, *, full: bool = False) -> str:
    """Digest the weights of ``source``: the ``revision`` of a namespace. 32 hexadecimal digits.

    ``source`` is a model directory, an adapter's directory (LoRA), one safetensors file, or a
    ``torch.nn.Module`` with its weights loaded. ``full`` reads every byte, not samples; the two
    give different digests of large tensors.

    Files' digests are remembered by the files' identity (path, size, times, inode) in
    ``$XDG_CACHE_HOME/kvkeep/weights.json``, which may be deleted at any time.

    Cost: remembered, one stat a file; else `SPANS` seeks a large tensor, from 8 threads: about
    46,000 reads of 4 KiB for a model of 70B parameters. A module's is never remembered, for its
    weights can change: about 1 ms for each large tensor. Thread safety: any.

    Raises:
        InvalidValue: no such path, no safetensors file there (pickled weights are never read), a
            file that is damaged, or a module whose weights are not in memory.
    """
    if not isinstance(source, str | os.PathLike):
        return _digest(_of_module(source, full), full)
    files = find_files(Path(source))
    cache = WeightsCache()
    identity = [FileIdentity.of(file) for file in files]
    key = cache.key(identity, full=full)
    if (known := cache.find(key)) is not None:
        return known
    digest = _digest(_of_files(files), full)
    if identity == [FileIdentity.of(file) for file in files]:  # nobody wrote to them meanwhile
        cache.remember(key, digest, identity)
    return digest


def _digest(tensors: list[Weights], full: bool) -> str:
    """The digest over all tensors, in the order of their names."""
    tensors.sort(key=lambda tensor: tensor.name)
    with ThreadPoolExecutor(_READERS) as readers:
        marks = list(readers.map(lambda tensor: _mark(tensor, full), tensors))
    seen = {mark for tensor, mark in zip(tensors, marks, strict=True) if not _is_head(tensor)}
    whole = hashlib.blake2b(_MAGIC, digest_size=_DIGEST_BYTES)
    for tensor, mark in zip(tensors, marks, strict=True):
        if not (_is_head(tensor) and mark in seen):  # tied: whether it is stored says nothing
            name = tensor.name.encode("utf-8", "surrogatepass")
            whole.update(b"%d:%s=%s" % (len(name), name, mark))
    return whole.hexdigest()


def _mark(tensor: Weights, full: bool) -> bytes:
    """A digest of one tensor without its name."""
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
    """Which bytes of a tensor are looked at: the first, the last, and evenly between."""
    if full:
        step = 1 << 20
        return [(at, min(step, num_bytes - at)) for at in range(0, num_bytes, step)]
    if num_bytes <= _WHOLE:
        return [(0, num_bytes)]
    last = num_bytes - SPAN_BYTES
    return [(last * span // (SPANS - 1), SPAN_BYTES) for span in range(SPANS)]


def _of_files(files: list[Path]) -> list[Weights]:
    """The tensors of all ``files``; a name that comes twice is a mistake of who put them there."""
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


def _of_module(module: torch.nn.Module, full: bool) -> list[Weights]:
    """Parameters and persistent buffers; what is tied, that is the same memory, counts once."""
    torch = require("torch", "torch")
    if not isinstance(module, torch.nn.Module):
        raise InvalidValue(
            f"weights are those of a path or a torch.nn.Module, got {type(module).__name__}"
        )
    found: list[Weights] = []
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue  # what a module keeps beside its weights
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta or dtype not in _DTYPES or value.layout is not torch.strided:
            where = "on no device: load the weights first" if value.is_meta else f"{value.dtype}"
            raise InvalidValue(f"the weights {name!r} cannot be read, they are {where}")
        identity = (value.data_ptr(), tuple(value.shape), value.stride())
        if value.numel() and identity in seen:
            continue
        seen.add(identity)
        found.append(_of_tensor(name.replace("_orig_mod.", ""), _DTYPES[dtype], value, full))
    return found


def _of_tensor(name: str, dtype: str, value: torch.Tensor, full: bool) -> Weights:
    def read(spans: Spans) -> Iterable[memoryview]:
        torch = require("torch", "torch")
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        if full:
            return (flat[at : at + size].cpu().numpy().data for at, size in spans)
        # One copy from the device for all samples of a tensor.
        return [torch.cat([flat[at : at + size] for at, size in spans]).cpu().numpy().data]

    shape = tuple(value.shape)
    return Weights(name, dtype, shape, math.prod(shape) * value.element_size(), read)
