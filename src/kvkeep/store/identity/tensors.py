"""Digests of tensors: 16 bytes that stand for the dtype, the shape and every byte of a tensor.

A tensor is read in pieces of `PIECE` bytes. A piece's digest is its XXH3 of 128 bits. XXH3 runs at
the bandwidth of memory and releases the interpreter lock, so several threads hash pieces. The
digest of a tensor is the XXH3 of its description and of the digests of its pieces. XXH3 detects
accidental changes; it does not resist weights that were constructed to collide (docs/keys.md).

The model is never copied as a whole: tensors of other devices are copied in pieces, and tensors
that are not contiguous one at a time.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import torch

from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["PIECE", "TensorDigests"]

PIECE: Final = 16 << 20
"""Bytes of a piece; part of the format of digests."""

_THREADS: Final = min(8, os.cpu_count() or 1)


class TensorDigests:
    """Digests of the tensors of one model; memory that several tensors share is read once.

    Valid as long as the tensors do not change. Thread safety: none.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}
        # Tensors that were read; kept alive so that no other tensor can take their address.
        self._held: list[Tensor] = []

    def read(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Read ``(name, tensor)`` pairs, so that `of` need not read them."""
        self._read_parts([part for name, tensor in tensors for part in _parts(name, tensor)])

    def _read_parts(self, parts: Sequence[tuple[str, Tensor]]) -> None:
        found: dict[tuple[object, ...], tuple[str, Tensor]] = {}
        for name, part in parts:
            found.setdefault(_key(part), (name, part))
        new = {key: part for key, part in found.items() if key not in self._known}
        self._held += [part for _, part in new.values()]
        with ThreadPoolExecutor(_THREADS) as threads:
            small = {key: part for key, part in new.items() if part[1].nbytes <= PIECE}
            digests = threads.map(lambda part: _digest(part[0], part[1], map), small.values())
            self._known.update(zip(small, digests, strict=True))
            for key in new.keys() - small.keys():
                # One at a time: its pieces use all threads, and only one copy exists.
                name, tensor = new[key]
                self._known[key] = _digest(name, tensor, threads.map)

    def of(self, name: str, tensor: Tensor) -> str:
        """Return the digest of ``tensor`` as hexadecimal text; ``name`` is for messages.

        Raises:
            InvalidValue: the tensor is on the meta device, is not strided, or cannot be read.
        """
        parts = list(_parts(name, tensor))
        if any(_key(part) not in self._known for _, part in parts):
            self._read_parts(parts)
        digests = [self._known[_key(part)] for _, part in parts]
        if len(parts) == 1 and parts[0][1] is tensor:
            return digests[0]
        return f"{type(tensor).__name__}({','.join(digests)})"


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield ``tensor``, or the inner tensors of a subclass that wraps some (a quantised tensor).

    Raises `InvalidValue` if the tensor cannot be read.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for inner in flatten()[0]:
            yield from _parts(f"{name}.{inner}", getattr(tensor, inner))
    elif tensor.is_meta:
        raise InvalidValue(
            f"the weights {name!r} are on no device (meta): load them, or take offloading off, "
            "before KV of this model is kept"
        )
    elif tensor.is_quantized:
        yield f"{name}.int_repr", tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            measures = [
                torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)
            ]
        else:
            axis = torch.tensor(tensor.q_per_channel_axis())
            measures = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), axis]
        for measure in measures:
            yield f"{name}.scale", measure
    elif tensor.layout is not torch.strided:
        raise InvalidValue(
            f"the weights {name!r} are {tensor.layout}; only strided tensors can be identified"
        )
    else:
        yield name, tensor


def _key(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.data_ptr(), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _digest(name: str, tensor: Tensor, each: Callable[..., Iterator[bytes]]) -> str:
    """Return the digest of ``tensor``; ``each`` is the `map` that hashes its pieces."""
    shape = ",".join(map(str, tensor.shape))
    whole = require("xxhash", "store").xxh3_128(f"{tensor.dtype}[{shape}]\n".encode())
    # Inference mode allows views of weights that require gradients.
    with torch.inference_mode():
        try:
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            raw = flat.view(torch.uint8)
            for digest in each(_piece, _pieces(raw)):
                whole.update(digest)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise InvalidValue(
                f"the weights {name!r} ({tensor.dtype} on {tensor.device}) cannot be read: {error}"
            ) from error
    return str(whole.hexdigest())


def _pieces(raw: Tensor) -> Iterator[Tensor]:
    """Yield ``raw`` (uint8, one dimension) in pieces."""
    for at in range(0, len(raw), PIECE):
        yield raw[at : at + PIECE]


def _piece(raw: Tensor) -> bytes:
    """Return the digest of a piece, copied to the host if it lies on another device."""
    digest: bytes = require("xxhash", "store").xxh3_128_digest(raw.cpu().numpy().data)
    return digest
