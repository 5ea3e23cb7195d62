"""A reader of basis files and of records of `transform`, as docs/codecs.md describes them.

Loops and NumPy: nothing of the codec's own.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING

import numpy as np
from numcodecs import blosc

if TYPE_CHECKING:
    from pathlib import Path

BANDS = ((0.25, 5, 1), (0.55, 3, 2), (1.6, 2, 7), (5.0, 1, 127), (np.inf, 1, 127))


def read_basis(path: Path) -> dict:
    """The description, with "speeds", "digest", and the arrays in each group."""
    content = path.read_bytes()
    magic, version, length = struct.unpack_from("<8sII", content)
    assert (magic, version) == (b"kvkeepT\n", 1)
    basis = json.loads(content[16 : 16 + length])
    at = 16 + length
    assert hashlib.sha256(content[:-32]).digest() == content[-32:]
    basis["digest"] = content[-32:-16]

    def take(kind: str, *shape: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(content, kind, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        return array

    basis["speeds"] = take("<f8", basis["pairs"])
    dims = [dim for heads, dim in basis["parts"] for _ in range(heads)]
    for group in basis["groups"]:
        width, rank = sum(dims[head] for head in group["heads"]), group["rank"]
        for name in ("mean", "scale", "tolerance"):
            group[name] = take("<f4", width)
        group["spread"] = take("<f4", rank)
        group["rows"] = take("i1", rank, width)
        group["forward"] = take("<f4", width, rank)
    assert at == len(content) - 32
    return basis


def read_record(encoded: bytes, basis: dict, tokens: int, item: int):
    """Numbers [tokens, channels] in float64, which of them are exact, and the tolerance of each.

    The channels of all parts side by side, in NHD order. Exact numbers are given as their bits.
    """
    digest, start, zeros = struct.unpack_from("<16sII", encoded)
    assert digest == basis["digest"]
    assert zeros == 0
    at = 24
    dims = [dim for heads, dim in basis["parts"] for _ in range(heads)]
    part_of = [part for part, (heads, _) in enumerate(basis["parts"]) for _ in range(heads)]
    begin = np.concatenate([[0], np.cumsum(dims)])
    numbers = np.zeros((tokens, begin[-1]))
    bits = np.zeros((tokens, begin[-1]), f"<u{item}")
    exact = np.zeros((tokens, begin[-1]), bool)
    tolerance = np.zeros((tokens, begin[-1]))
    for first in range(0, tokens, 1024):
        count = min(1024, tokens - first)
        for groups in _batches(basis["groups"], count):
            kept, exceptions = struct.unpack_from("<II", encoded, at)
            at += 8
            columns = [
                np.concatenate([np.arange(begin[h], begin[h + 1]) for h in group["heads"]])
                for group in groups
            ]
            if kept == 1 << 31:
                for column in columns:
                    size = count * len(column)
                    rows = np.frombuffer(encoded, f"<u{item}", size, at)
                    at += size * item
                    bits[first : first + count, column] = rows.reshape(count, -1)
                    exact[first : first + count, column] = True
                continue
            where = np.frombuffer(encoded, "<u4", kept, at)
            at += 4 * kept
            for number, token in zip(*np.divmod(where, count), strict=True):
                column = columns[number]
                bits[first + token, column] = np.frombuffer(encoded, f"<u{item}", len(column), at)
                exact[first + token, column] = True
                at += item * len(column)
            places = np.frombuffer(encoded, "<u4", exceptions, at)
            at += 4 * exceptions
            values = np.frombuffer(encoded, "i1", exceptions, at)
            at += exceptions
            codes, at = _codes(encoded, at, groups, count, (places, values))
            for group, code, column in zip(groups, codes, columns, strict=True):
                sums = code.T @ group["rows"].astype(float)
                found = (sums.astype("f4") * group["scale"] + group["mean"]).astype(float)
                limit = np.tile(group["tolerance"].astype(float), (count, 1))
                inside = 0
                for head in group["heads"]:
                    if part_of[head] in basis["rotated"]:
                        _turn(found[:, inside:], limit[:, inside:], basis["speeds"], start + first)
                    inside += dims[head]
                numbers[first : first + count, column] = found
                tolerance[first : first + count, column] = limit
    assert at == len(encoded)
    return numbers, bits, exact, tolerance


def _codes(encoded: bytes, at: int, groups, count: int, exceptions):
    """The codes [rank, tokens] of each group, and where their bands end."""
    codes = [np.zeros((group["rank"], count)) for group in groups]
    order = []
    for band, (most, per_byte, largest) in enumerate(BANDS):
        least = BANDS[band - 1][0] if band else -1.0
        rows = [
            (number, row)
            for number, group in enumerate(groups)
            for row, spread in enumerate(group["spread"])
            if np.float32(least) <= spread < np.float32(most)
        ]
        if not rows:
            continue
        size = -(-len(rows) * count // per_byte)
        packed, at = _frames(encoded, at, size)
        if per_byte == 1:
            flat = packed.view("i1").astype(int)
        else:
            radix = 2 * largest + 1
            digits = [packed.astype(int) // radix**j % radix for j in range(per_byte)]
            flat = np.concatenate(digits) - largest
        flat = flat[: len(rows) * count].reshape(len(rows), count)
        for (number, row), line in zip(rows, flat, strict=True):
            codes[number][row] = line
        order += rows
    for place, value in zip(*exceptions, strict=True):
        number, row = order[place // count]
        codes[number][row, place % count] = value
    return codes, at


def _batches(groups, count):
    batches, numbers = [], 0
    for group in groups:
        numbers += len(group["mean"]) * count
        if not batches or numbers > 1 << 20:
            batches.append([])
            numbers = len(group["mean"]) * count
        batches[-1].append(group)
    return batches


def _frames(encoded: bytes, at: int, size: int):
    pieces = []
    while size:
        (length,) = struct.unpack_from("<I", encoded, at)
        body = encoded[at + 4 : at + 4 + (length & 0x7FFFFFFF)]
        at += 4 + len(body)
        pieces.append(np.frombuffer(body if length >> 31 else blosc.decompress(body), np.uint8))
        size -= len(pieces[-1])
    return np.concatenate(pieces), at


def _turn(head: np.ndarray, limit: np.ndarray, speeds: np.ndarray, start: int) -> None:
    """Turn the pairs of a head; an error of each channel up to its tolerance is turned as well."""
    pairs = len(speeds)
    angles = np.arange(start, start + len(head))[:, None] * speeds
    first, second = head[:, :pairs].copy(), head[:, pairs : 2 * pairs].copy()
    head[:, :pairs] = first * np.cos(angles) - second * np.sin(angles)
    head[:, pairs : 2 * pairs] = second * np.cos(angles) + first * np.sin(angles)
    length = np.hypot(limit[:, :pairs], limit[:, pairs : 2 * pairs])
    limit[:, :pairs] = limit[:, pairs : 2 * pairs] = length
