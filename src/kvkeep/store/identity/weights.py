"""`weights_digest`: a digest of the weights in files, as 32 hexadecimal characters.

`kvkeep.store.identity` includes it, with everything else that decides the numbers of KV: use that
for a namespace. The digest covers the name, dtype and shape of each tensor, and samples of its
bytes. It does not depend on ``config.json``, the order of tensors, or their division among files.

Samples are `SPANS` spans of `SPAN_BYTES`, spread evenly over a tensor from its first to its last
byte; tensors of up to 256 KiB are read whole. Training, merging an adapter and quantising change
nearly every element and are seen. A change to a few elements between two spans is not seen: one row
of an embedding, one element edited by hand. ``full=True`` reads every byte.

    model directory ─▶ index of shards, or *.safetensors ─▶ headers ─▶ tensors ─▶ samples ─▶ digest
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.store.identity.weights_cache import FileIdentity, WeightsCache
from kvkeep.store.identity.weights_files import Weights, find_files, read_header

if TYPE_CHECKING:
    from kvkeep.store.identity.weights_files import Spans

__all__ = ["SPANS", "SPAN_BYTES", "weights_digest"]

SPANS = 64
SPAN_BYTES = 4096
_WHOLE = SPANS * SPAN_BYTES  # tensors of up to this many bytes are read whole
_MAGIC = b"kvkeep weights 1\n"
_DIGEST_BYTES = 16
_READERS = 8  # threads: a cold disk answers many seeks at once
# Output layers that many models tie to their embedding; only some files hold the tied tensor.
_HEADS = ("lm_head.weight", "embed_out.weight")


def weights_digest(source: str | os.PathLike[str], *, full: bool = False) -> str:
    """Return a digest of the weights in files: 32 hexadecimal digits.

    ``source`` is a model directory, a directory with an adapter (LoRA), or one safetensors file. Of
    a model directory that also holds an adapter, only the model's weights count. ``full`` reads
    every byte, not samples; the two give different digests of large tensors.

    Digests are cached by the files' identity (path, size, times, inode) in
    ``$XDG_CACHE_HOME/kvkeep/weights.json``, which may be deleted at any time.

    Cost: if cached, one stat a file; else `SPANS` seeks a large tensor, from 8 threads: about
    46,000 reads of 4 KiB for a model of 70B parameters. Thread safety: any.

    Raises:
        InvalidValue: there is no such path; it has no safetensors file; it has pickled weights that
            may be loaded instead of them (pickles are never read); or a file is damaged.
    """
    if not isinstance(source, str | os.PathLike):
        raise InvalidValue(
            f"the weights of a path are needed, got {type(source).__name__}; for a loaded module, "
            "use kvkeep.store.model_identity"
        )
    files = find_files(Path(source))
    cache = WeightsCache()
    identity = [FileIdentity.of(file) for file in files]
    key = cache.key(identity, full=full)
    if (known := cache.find(key)) is not None:
        return known
    digest = _digest(_of_files(files), full)
    if identity == [FileIdentity.of(file) for file in files]:  # unchanged while they were read
        cache.remember(key, digest, identity)
    return digest


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
