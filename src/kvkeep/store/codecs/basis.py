"""`Basis`: how the codec `transform` turns KV of one model into codes, and its file.

A basis file:

    8       magic: "kvkeepT\\n"
    4       format version, 1
    4       length of the description in bytes, at most 1 MiB
    n       the description, JSON: model, parts, rotated, pairs, longest, groups (heads, rank)
    arrays  speeds of the rotary embedding, float64 [pairs]
            of each group: mean, scale, tolerance, float32 [width]; spread, float32 [rank];
            rows, int8 [rank, width]; forward, float32 [width, rank]
    32      SHA-256 of everything before

Integers and floats are little-endian. The first 16 bytes of the SHA-256 name the basis in records.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.store.codecs.keyfile import nonblocking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["DIGEST_BYTES", "WIDEST", "Basis", "HeadGroup", "load_basis"]

DIGEST_BYTES = 16
WIDEST = 1024
"""The most channels of a group: sums of so many products of two int8 are exact in float32."""

_HEAD = struct.Struct("<8sII")
_MAGIC = b"kvkeepT\n"
_VERSION = 1
_SUM = 32
_LONGEST_DESCRIPTION = 1 << 20
_LARGEST_FILE = 4 << 30
_MOST_HEADS = 1 << 16
_LONGEST_PROMPT = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class HeadGroup:
    """Heads whose channels are transformed together; ``width`` channels, ``rank`` codes a token.

    Attributes:
        heads: numbers of the heads, counted from the first part's first one.
        mean: of each channel, float32 [width].
        scale: of each channel, float32 [width], above 0.
        tolerance: the largest error of each channel of a coded token, float32 [width].
        spread: standard deviation of each code, float32 [rank], not ascending.
        rows: int8 [rank, width]; channels = mean + scale * (codes @ rows).
        forward: float32 [width, rank]; codes = round((channels - mean) @ forward).
    """

    heads: tuple[int, ...]
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    tolerance: NDArray[np.float32]
    spread: NDArray[np.float32]
    rows: NDArray[np.int8]
    forward: NDArray[np.float32]

    @property
    def width(self) -> int:
        """Channels of a token."""
        return len(self.mean)

    @property
    def rank(self) -> int:
        """Codes of a token."""
        return len(self.spread)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the order of the file."""
        return self.mean, self.scale, self.tolerance, self.spread, self.rows, self.forward


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Groups that have each head once; keys of ``rotated`` parts are turned back by position.

    Thread safety: immutable; do not alter its arrays.

    Attributes:
        model: what it was fitted to, for people.
        parts: (heads, dim) of each part, as in `BlockShape`.
        rotated: numbers of the parts with a rotary embedding, ascending.
        speeds: radians a token by which each pair of channels (i, i + pairs) of a rotated head
            turns, float64 [pairs]; empty if no part is rotated.
        longest: the most tokens of a prompt, among whose positions a block's is searched.
        groups: in the order of the record.
        digest: the bytes that name it in records.
    """

    model: str
    parts: tuple[tuple[int, int], ...]
    rotated: tuple[int, ...]
    speeds: NDArray[np.float64]
    longest: int
    groups: tuple[HeadGroup, ...]
    digest: bytes = b""

    def signed(self) -> Basis:
        """Return it with the digest that belongs to it."""
        digest = hashlib.sha256(self._unsigned()).digest()[:DIGEST_BYTES]
        return replace(self, digest=digest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; replace one that is there.

        Raises:
            InvalidValue: it cannot be written.
        """
        content = self._unsigned()
        place = Path(path)
        temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(content + hashlib.sha256(content).digest())
            temporary.replace(place)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise InvalidValue(f"the basis {place} cannot be written: {error.strerror}") from error

    def _unsigned(self) -> bytes:
        described = {
            "model": self.model,
            "parts": self.parts,
            "rotated": self.rotated,
            "pairs": len(self.speeds),
            "longest": self.longest,
            "groups": [{"heads": group.heads, "rank": group.rank} for group in self.groups],
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        arrays = [self.speeds, *(one for group in self.groups for one in group.arrays())]
        ordered = [one.astype(one.dtype.newbyteorder("<"), copy=False).tobytes() for one in arrays]
        return b"".join([_HEAD.pack(_MAGIC, _VERSION, len(text)), text, *ordered])


def load_basis(path: str | os.PathLike[str]) -> Basis:
    """Read a basis file. The sizes that it names are checked before memory is taken for them.

    Raises:
        InvalidValue: the file cannot be read, or is no intact basis.
    """
    place = Path(path)
    try:
        with open(place, "rb", opener=nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE:
                raise InvalidValue(f"{place} is no basis: not a file of at most 4 GiB")
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise InvalidValue(f"{place} is no basis: it has {len(head)} bytes")
            magic, version, length = _HEAD.unpack(head)
            if magic != _MAGIC:
                raise InvalidValue(f"{place} is no basis; kvkeep codec fit makes one")
            if version != _VERSION:
                raise InvalidValue(
                    f"{place} is a basis of version {version}; this kvkeep reads {_VERSION}"
                )
            if length > _LONGEST_DESCRIPTION:
                raise InvalidValue(f"{place} is no basis: {length} bytes of description")
            text = file.read(length)
            plan = _Plan.of(text, place)
            expected = _HEAD.size + length + plan.array_bytes() + _SUM
            if status.st_size != expected:
                raise InvalidValue(
                    f"the basis {place} has {status.st_size} bytes and should have {expected}"
                )
            body = file.read(plan.array_bytes())
            checksum = file.read(_SUM)
    except OSError as error:
        raise InvalidValue(f"the basis {place} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(head + text)
    digest.update(body)
    if digest.digest() != checksum:
        raise InvalidValue(f"the basis {place} is damaged: its checksum is wrong")
    return plan.fill(body, digest.digest()[:DIGEST_BYTES], place)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the description of a file says, checked."""

    model: str
    parts: tuple[tuple[int, int], ...]
    rotated: tuple[int, ...]
    pairs: int
    longest: int
    groups: tuple[tuple[tuple[int, ...], int, int], ...]  # heads, width, rank

    @classmethod
    def of(cls, text: bytes, place: Path) -> _Plan:
        """Read ``text``. Raises InvalidValue."""
        try:
            said = json.loads(text)
            model, pairs = said["model"], _whole(said["pairs"], WIDEST)
            parts = tuple((_whole(h, _MOST_HEADS), _whole(d, WIDEST)) for h, d in said["parts"])
            rotated = tuple(_whole(one, _MOST_HEADS) for one in said["rotated"])
            longest = _whole(said["longest"], _LONGEST_PROMPT)
            given = [
                (tuple(_whole(h, _MOST_HEADS) for h in one["heads"]), _whole(one["rank"], WIDEST))
                for one in said["groups"]
            ]
            if not isinstance(model, str) or sum(heads for heads, _ in parts) > _MOST_HEADS:
                raise ValueError("the model is no text, or there are too many heads")
            dims = [dim for heads, dim in parts for _ in range(heads)]
            if sorted(head for heads, _ in given for head in heads) != list(range(len(dims))):
                raise ValueError("the groups do not have each head once")
            groups = tuple((heads, sum(dims[h] for h in heads), rank) for heads, rank in given)
            if not all(0 <= rank <= width <= WIDEST for _, width, rank in groups):
                raise ValueError(f"a group is wider than {WIDEST}, or than its rank allows")
            if list(rotated) != sorted(set(rotated)) or bool(rotated) != bool(pairs):
                raise ValueError("rotated parts without speeds, or in disorder")
            if any(part >= len(parts) or parts[part][1] < 2 * pairs for part in rotated):
                raise ValueError("a rotated part that is not there, or is too narrow")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidValue(f"{place} is no basis: its description is wrong: {error}") from error
        return cls(model, parts, rotated, pairs, longest, groups)

    def shapes(self) -> Iterator[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Yield type and shape of each array of the groups, in order."""
        for _, width, rank in self.groups:
            yield from ((np.dtype("<f4"), (width,)),) * 3
            yield np.dtype("<f4"), (rank,)
            yield np.dtype("i1"), (rank, width)
            yield np.dtype("<f4"), (width, rank)

    def array_bytes(self) -> int:
        """Return the bytes of all arrays."""
        return 8 * self.pairs + sum(kind.itemsize * prod(shape) for kind, shape in self.shapes())

    def fill(self, body: bytes, digest: bytes, place: Path) -> Basis:
        """Return the basis with the arrays in ``body``. Raises InvalidValue."""
        speeds = np.frombuffer(body, "<f8", self.pairs)
        at = speeds.nbytes
        arrays = []
        for kind, shape in self.shapes():
            array = np.frombuffer(body, kind, prod(shape), at).reshape(shape)
            at += array.nbytes
            arrays.append(array.astype(kind.newbyteorder("=")))
        if not all(np.isfinite(one).all() for one in (speeds, *arrays) if one.dtype != np.int8):
            raise InvalidValue(f"the basis {place} has a number that is not finite")
        groups = []
        for number, (heads, _, _) in enumerate(self.groups):
            group = HeadGroup(heads, *arrays[6 * number : 6 * number + 6])
            if not ((group.scale > 0).all() and (group.tolerance > 0).all()):
                raise InvalidValue(
                    f"the basis {place} has a scale or tolerance that is not above 0"
                )
            if not ((np.diff(group.spread) <= 0).all() and (group.spread >= 0).all()):
                raise InvalidValue(f"the basis {place} has spreads that ascend or are below 0")
            groups.append(group)
        return Basis(
            self.model,
            self.parts,
            self.rotated,
            speeds.astype(np.float64),
            self.longest,
            tuple(groups),
            digest,
        )


def _whole(value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a whole number of at most {most}")
    return value
