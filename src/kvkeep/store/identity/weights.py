"""`weights_digest`: which weights files hold, as 32 hexadecimal characters.

It is a part of `kvkeep.store.identity`, which adds what else decides: use that for a namespace. The
digest is made of the tensors: the name, dtype and shape of each, and samples of its bytes. Left out
are ``config.json``, the order of tensors, and how they are divided among files.

Samples are `SPANS` spans of `SPAN_BYTES` spread evenly over a tensor, its first and last bytes
among them; up to 256 KiB are read whole. Training, merging an adapter and quantising change nearly
every element of a tensor, or of a head's rows, and are seen. Not seen is a change to a few elements
between two spans: one row of an embedding, one element edited by hand. ``full=True`` reads every
byte, for those who do that.

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
_WHOLE = SPANS * SPAN_BYTES  # a tensor of at most so many bytes is read whole
_MAGIC = b"kvkeep weights 1\n"
_DIGEST_BYTES = 16
_READERS = 8  # threads: a cold disk answers many seeks at once
# Output layers that many models tie to their embedding; some files hold the tied one, some do not.
_HEADS = ("lm_head.weight", "embed_out.weight")


def weights_digest(source: str | os.PathLike[str], *, full: bool = False) -> str:
    """Digest the weights in files. 32 hexadecimal digits.

    ``source`` is a model directory, an adapter's directory (LoRA), or one safetensors file. Of a
    model directory with an adapter beside the model, the model's weights alone. ``full`` reads
    every byte, not samples; the two give different digests of large tensors.

    Files' digests are remembered by the files' identity (path, size, times, inode) in
    ``$XDG_CACHE_HOME/kvkeep/weights.json``, which may be deleted at any time.

    Cost: remembered, one stat a file; else `SPANS` seeks a large tensor, from 8 threads: about
    46,000 reads of 4 KiB for a model of 70B parameters. Thread safety: any.

    Raises:
        InvalidValue: no such path, no safetensors file there, pickled weights that may be loaded
            in place of those there (they are never read), or a file that is damaged.
    """
    if not isinstance(source, str | os.PathLike):
        raise InvalidValue(
            f"weights are those of a path, got {type(source).__name__}; of a loaded module, "
            "kvkeep.store.model_identity tells all that decides"
        )
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
