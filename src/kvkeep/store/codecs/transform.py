"""transform: decorrelated by a basis fitted to the model, rounded, entropy-coded.

Encoded bytes:

    16     the basis: the first bytes of its file's SHA-256
    4      position of the first token, 0 without rotated parts
    4      zeros
    pieces, of runs of 1024 tokens (the last is shorter), each of some groups:
        4  bits 0 … 30: tokens of a group that are exact, e; bit 31: the piece is raw, and e is 0
        4  exceptions among the codes, x
        raw: the numbers of each group [tokens, width]
        else:
        4·e   for each of them: group in the piece · tokens + token, ascending
        …     the numbers of each of them [width], as they were
        4·x   places of the exceptions in the order of bands, row · tokens + token
        x     their codes, int8
        …     the bands (`kvkeep.store.codecs.code_bands`)

A piece has as many groups as have 2^20 numbers, one at least. Integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs.base import Codec, Damaged, OtherKey
from kvkeep.store.codecs.basis import DIGEST_BYTES, load_basis
from kvkeep.store.codecs.code_bands import CodeBands
from kvkeep.store.codecs.frames import BloscFrames
from kvkeep.store.codecs.group_transform import GroupTransform, Workspace, words_of
from kvkeep.store.codecs.kinds import KindsCodec
from kvkeep.store.codecs.one_thread import one_thread
from kvkeep.store.codecs.positions import RUN_TOKENS, Positions
from kvkeep.store.codecs.raw import RawCodec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from kvkeep.store.codecs.base import BlockShape
    from kvkeep.store.codecs.basis import Basis

    Bits = NDArray[Any]
    Turns = tuple[Tensor, Tensor]

__all__ = ["TransformCodec", "transform_of"]

_HEAD = struct.Struct(f"<{DIGEST_BYTES}sII")
_PIECE = struct.Struct("<II")
_RAW = 1 << 31
_NUMBERS = 1 << 20  # of a piece
_LATEST = 1 << 31  # positions above it would not fit the sines


def transform_of(setting: str, shape: BlockShape) -> Codec:
    """Return the codec with the ``setting`` basis=FILE[,FILE…]: it writes with the first basis.

    Of several kinds of records, those that the basis is not for stay raw; the first is KV.

    Raises:
        InvalidValue: the setting names no basis, one cannot be read, or is for another geometry.
    """
    name, _, files = setting.partition("=")
    if name != "basis" or not all(files.split(",")):
        raise InvalidValue(
            "codec transform needs a basis of the model: transform:basis=FILE, which kvkeep codec "
            f"fit makes; got {setting!r}"
        )
    bases = [load_basis(file) for file in files.split(",")]
    if not shape.kinds:
        return TransformCodec(shape, bases)
    first = TransformCodec(shape.kinds[0], bases)
    others = (
        TransformCodec(kind, bases) if kind.parts == bases[0].parts else RawCodec()
        for kind in shape.kinds[1:]
    )
    return KindsCodec([first, *others])


class TransformCodec(Codec):
    """Encodes with the first of ``bases``, decodes with all of them.

    Every channel of a token is within its tolerance in the basis, plus rounding to the block's
    type; a token for which that would not hold is stored exactly. A record of another basis raises
    `OtherKey`.

    Computes in the calling thread. Memory beside the two buffers: a few MiB for the codes of a
    piece, and 1.3 MiB for each thread.

    Raises:
        InvalidValue: a basis is for another geometry, or blocks have no numbers to transform.
    """

    name = "transform"
    number = 5
    exact = False

    def __init__(self, shape: BlockShape, bases: Sequence[Basis]) -> None:
        if not shape.dtype or not shape.parts:
            raise InvalidValue(
                "codec transform needs the element type, and these bytes are opaque; raw and "
                "lossless work on any bytes"
            )
        if DTYPES[shape.dtype] < 2:
            raise InvalidValue(
                f"codec transform is for numbers of two or four bytes, not {shape.dtype}; use raw "
                "or lossless"
            )
        if shape.layout not in ("NHD", "HND"):
            raise InvalidValue(f"layout is 'NHD' or 'HND', got {shape.layout!r}")
        for basis in bases:
            if basis.parts != shape.parts:
                raise InvalidValue(
                    f"the basis of {basis.model} is for {_geometry(basis.parts)}, and this model's "
                    f"KV has {_geometry(shape.parts)}: fit one by kvkeep codec fit"
                )
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._item = DTYPES[shape.dtype]
        self._token_bytes = sum(heads * dim for heads, dim in shape.parts) * self._item
        self._memory = Workspace(self._dtype)
        frames = BloscFrames()
        self._plans = {basis.digest: _Plan(basis, self._dtype, frames) for basis in reversed(bases)}
        self._own = self._plans[bases[0].digest]

    def bound(self, raw_bytes: int) -> int:
        """Return the raw size, plus the head and 8 bytes for each piece."""
        tokens = raw_bytes // self._token_bytes
        return raw_bytes + _HEAD.size + _PIECE.size * len(list(self._own.pieces(tokens)))

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode piece by piece."""
        del bound_to
        tokens, rest = divmod(len(raw), self._token_bytes)
        assert tokens, "a block without a token"
        assert not rest, f"{len(raw)} bytes are not whole tokens of {self._token_bytes}"
        plan = self._own
        views = self._views(raw, tokens, plan.words)
        with one_thread():
            start = plan.find_start(views)
            _HEAD.pack_into(out, 0, plan.basis.digest, start, 0)
            at = _HEAD.size
            for piece in plan.pieces(tokens):
                numbers = [one[piece.tokens] for one in views]
                turns = plan.turns(start, piece)
                at += self._encode_piece(piece, numbers, turns, out[at:])
        return at

    def _encode_piece(
        self, piece: _Piece, views: list[Bits], turns: Turns | None, out: memoryview
    ) -> int:
        coded = [group.encode(views, turns, self._memory) for group in piece.groups]
        joined = piece.bands.join([codes for codes, _ in coded])
        places, values = piece.bands.take_exceptions(joined)
        where = np.flatnonzero(np.concatenate([exact for _, exact in coded])).astype("<u4")
        rows = [
            group.rows_of(views, exact)
            for group, (_, exact) in zip(piece.groups, coded, strict=True)
        ]
        lists = b"".join([where.tobytes(), *rows, places.astype("<u4").tobytes(), values.tobytes()])
        raw_size = sum(group.width for group in piece.groups) * piece.size * self._item
        if len(lists) < raw_size:
            frames = np.empty(piece.bands.bound(piece.size), np.uint8).data
            size = piece.bands.write(joined, frames)
            if len(lists) + size < raw_size:
                _PIECE.pack_into(out, 0, len(where), len(places))
                end = _PIECE.size + len(lists)
                out[_PIECE.size : end] = lists
                out[end : end + size] = frames[:size]
                return end + size
        _PIECE.pack_into(out, 0, _RAW, 0)
        out[_PIECE.size : _PIECE.size + raw_size] = b"".join(
            group.rows_of(views, slice(0, piece.size)) for group in piece.groups
        )
        return _PIECE.size + raw_size

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Decode piece by piece into ``out``."""
        del bound_to
        tokens, rest = divmod(len(out), self._token_bytes)
        if rest or not tokens:
            raise Damaged(f"{len(out)} bytes are not whole tokens of {self._token_bytes}")
        if len(encoded) < _HEAD.size:
            raise Damaged(f"{len(encoded)} bytes are too short to name a basis")
        digest, start, zeros = _HEAD.unpack_from(encoded)
        plan = self._plans.get(digest)
        if plan is None:
            raise OtherKey(f"the record is transformed by the basis {digest.hex()}")
        if start >= _LATEST or zeros:
            raise Damaged(f"{start} is no position of a first token")
        views = self._views(out, tokens, plan.words)
        reader = _Reader(encoded[_HEAD.size :])
        with one_thread():
            for piece in plan.pieces(tokens):
                numbers = [one[piece.tokens] for one in views]
                self._decode_piece(piece, reader, plan.turns(start, piece), numbers)
        if len(reader.rest):
            raise Damaged(f"{len(reader.rest)} bytes after the last piece")

    def _decode_piece(
        self, piece: _Piece, reader: _Reader, turns: Turns | None, views: list[Bits]
    ) -> None:
        exact, exceptions = _PIECE.unpack(reader.take(_PIECE.size))
        if exact == _RAW:
            for group in piece.groups:
                group.place(reader.take(piece.size * group.width * self._item), slice(None), views)
            return
        if exact > piece.size * len(piece.groups) or exceptions > piece.size * piece.bands.rows:
            raise Damaged(f"{exact} exact tokens and {exceptions} exceptions of {piece.size}")
        which, tokens = np.divmod(
            reader.integers(exact, piece.size * len(piece.groups)), piece.size
        )
        if (np.diff(which) < 0).any():
            raise Damaged("exact tokens are not in the order of the groups")
        kept = []
        for number, group in enumerate(piece.groups):
            at = tokens[which == number]
            kept.append((at, reader.take(len(at) * group.width * self._item)))
        places = reader.integers(exceptions, piece.bands.rows * piece.size)
        values = np.frombuffer(reader.take(exceptions), np.int8)
        joined, size = piece.bands.read(reader.rest, piece.size)
        reader.take(size)
        joined.reshape(-1)[places] = values
        codes = [np.empty((group.rank, piece.size), np.int8) for group in piece.groups]
        piece.bands.split(joined, codes)
        for group, one, (at, rows) in zip(piece.groups, codes, kept, strict=True):
            group.decode(one, turns, views, self._memory)
            if len(at):
                group.place(rows, at, views)

    def _views(self, buffer: memoryview, tokens: int, words: int) -> list[Bits]:
        """Return each part of ``buffer`` as [tokens, heads, words], whatever the layout.

        A word is an integer with so many numbers.
        """
        bits = np.frombuffer(buffer, f"u{self._item * words}")
        views = []
        at = 0
        for heads, dim in self._shape.parts:
            part = bits[at : at + tokens * heads * dim // words]
            at += len(part)
            if self._shape.layout == "HND":
                views.append(part.reshape(heads, tokens, -1).transpose(1, 0, 2))
            else:
                views.append(part.reshape(tokens, heads, -1))
        return views


class _Piece(NamedTuple):
    """``size`` tokens of some groups."""

    first: int
    size: int
    groups: list[GroupTransform]
    bands: CodeBands

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.size)


class _Plan:
    """A basis as its codec uses it. Immutable, apart from caches."""

    def __init__(self, basis: Basis, dtype: torch.dtype, frames: BloscFrames) -> None:
        self.basis = basis
        self._frames = frames
        self._groups = [GroupTransform(group, basis, dtype) for group in basis.groups]
        pairs = len(basis.speeds)
        self.words = words_of(basis, dtype)
        self._positions = None
        if pairs:
            heads = max(group.turned for group in self._groups) // pairs
            self._positions = Positions(basis.speeds, basis.longest, heads)
        self._batches: dict[int, list[tuple[list[GroupTransform], CodeBands]]] = {}

    def pieces(self, tokens: int) -> Iterator[_Piece]:
        """Yield the pieces of a block of ``tokens`` tokens."""
        for first in range(0, tokens, RUN_TOKENS):
            count = min(RUN_TOKENS, tokens - first)
            for groups, bands in self._batched(count):
                yield _Piece(first, count, groups, bands)

    def find_start(self, views: Sequence[Bits]) -> int:
        """Return the position of the first token as the keys show it."""
        if self._positions is None:
            return 0
        turned = torch.zeros(len(self.basis.speeds), dtype=torch.complex64)
        for group in self._groups:
            found = group.correlate(self._positions, views)
            if found is not None:
                turned += found
        return self._positions.find(turned)

    def turns(self, start: int, piece: _Piece) -> Turns | None:
        """Return cosines and sines of the piece's tokens."""
        if self._positions is None:
            return None
        return self._positions.turns(start + piece.first, piece.size)

    def _batched(self, count: int) -> list[tuple[list[GroupTransform], CodeBands]]:
        # Of a run of another length the batches differ; there are at most 1024 lengths, and the
        # blocks of a store have one or two.
        found = self._batches.get(count)
        if found is None:
            batches: list[list[GroupTransform]] = []
            numbers = _NUMBERS
            for group in self._groups:
                numbers += group.width * count
                if numbers > _NUMBERS:
                    batches.append([])
                    numbers = group.width * count
                batches[-1].append(group)
            found = [
                (batch, CodeBands([one.group.spread for one in batch], self._frames))
                for batch in batches
            ]
            self._batches[count] = found
        return found


class _Reader:
    """Takes what a record says from the front of ``rest``, as far as it is there."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def take(self, size: int) -> memoryview:
        if len(self.rest) < size:
            raise Damaged(f"{len(self.rest)} bytes where {size} are expected")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def integers(self, count: int, limit: int) -> NDArray[np.int64]:
        found = np.frombuffer(self.take(4 * count), "<u4").astype(np.int64)
        if count and int(found.max()) >= limit:
            raise Damaged(f"{int(found.max())} is no place among {limit}")
        return found


def _geometry(parts: Sequence[tuple[int, int]]) -> str:
    sizes = sorted({f"{heads} heads of {dim}" for heads, dim in parts})
    return f"{len(parts)} parts ({', '.join(sizes)})"
