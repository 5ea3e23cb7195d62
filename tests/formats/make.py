"""Writes the fixtures of this version: what `test_every_format.py` reads with every later version.

    .venv/bin/python tests/formats/make.py            the folder of this version, if it is missing
    .venv/bin/python tests/formats/make.py VERSION    another name

Everything is seeded. What is expected stands beside each fixture as plain values, in ``*.json``, so
that the test needs none of the code below. Of a released version no file is ever changed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from kvkeep.bench.traces import TraceRequest, write_trace
from kvkeep.bench.traces.chain import chain_tokens
from kvkeep.bench.traces.request import Served
from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.core.extras import as_extras
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.core.keys import Namespace, chain_keys, root_key, space_of
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.kv_events.wire import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    encode,
    salt_digest,
)
from kvkeep.store import KVStore, Snapshot
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.codecs import BlockShape, make_codec
from kvkeep.store.codecs.encrypted import EncryptedCodec
from kvkeep.store.identity.files import weights_digest
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.record_codec import RecordCodec

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = Path(__file__).parent
KEY = bytes(range(32))
SHAPE = BlockShape("bfloat16", "NHD", ((2, 16), (2, 16)))
BLOCK = bytes(range(48))


def plain(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def note(folder: Path, name: str, expected: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(expected, separators=(",", ":")) + "\n", "utf-8")


def numbers(seed: int, *shape: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Whole numbers below 256, by a generator that NumPy never changes."""
    found = np.random.RandomState(seed).randint(0, 256, shape)
    return torch.from_numpy(found.astype(np.float32)).to(getattr(torch, dtype))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


# --- names of blocks -------------------------------------------------------------------------


def keys(folder: Path) -> None:
    found = []
    for fields, block in (
        ({}, 4),
        ({"tenant": "acmé", "model": "m", "revision": "r@1", "dtype": "bfloat16", "lora": "l"}, 16),
        ({"layout": "NHD", "geometry": "2x2x8", "rank": "tp0/2", "scope": "public"}, 7),
    ):
        namespace = Namespace(**fields)
        tokens = [number * number % 50_000 for number in range(24)]
        extra = [(3, b"an image"), (18, b"another")]
        raw, root = as_tokens(tokens).tobytes(), root_key(namespace)
        marked = as_extras(extra, len(tokens))
        found.append({
            "namespace": fields,
            "canonical": plain(namespace.canonical()),
            "root": root.hex(),
            "space": space_of(namespace).hex(),
            "block_tokens": block,
            "tokens": tokens,
            "keys": [key.hex() for key in chain_keys(root, raw, block * 4)],
            "extra": [[at, plain(data)] for at, data in extra],
            "keys_with_extra": [key.hex() for key in chain_keys(root, raw, block * 4, marked)],
        })  # fmt: skip
    note(folder, "keys.json", {"chains": found, "salt": ["a salt", salt_digest("a salt")]})


# --- directories of disk tiers ---------------------------------------------------------------


def store(folder: Path) -> None:
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
    options: dict[str, Any] = {"model": "tiny@1", "block_tokens": 4}
    prompts, public = [], list(range(900, 908))
    with KVStore(
        KVGeometry(**shape),
        tiers=["memory://1MiB", f"file://{folder / 'store'}?size=16MiB"],
        **options,
    ) as opened:
        opened.public.declare(public)
        for seed, (tenant, count, tail, extra) in enumerate((
            ("", 12, False, []), ("acme", 10, True, []), ("acme", 8, False, [(1, b"an image")]),
            ("acme", 12, False, []),
        )):  # fmt: skip
            tokens = [100 * seed + number for number in range(count)]
            if seed == 3:
                tokens[: len(public)] = public
            kv = numbers(seed, 2, 2, count, 2, 8)
            opened.put(tokens, kv, tenant=tenant, tail=tail, extra=extra, wait=True)
            prompts.append({
                "tokens": tokens, "tenant": tenant, "kv": plain(bytes_of(kv)),
                "extra": [[at, plain(data)] for at, data in extra],
            })  # fmt: skip
        opened.flush()
    with DiskBackend(folder / "store") as backend:
        blocks = {listed.block.hex(): listed.size for listed in backend.list()}
        notes = {space.hex(): note.decode() for space, note in backend.noted_spaces().items()}
    note(folder, "store.json", {
        "geometry": shape, "options": options, "prompts": prompts, "blocks": blocks,
        "public": public, "budget": 16 << 20, "spaces": notes,
    })  # fmt: skip


def snapshots(folder: Path) -> None:
    heads = AttentionShape(2, 4)
    geometry = KVGeometry.of(
        (
            LayerGroup("full", (0,), heads),
            LayerGroup("window", (1,), heads, 6),
            LayerGroup("state", (2,), state=(StateTensor("conv", (3, 2), "float32"),)),
        ),
        dtype="bfloat16",
    )
    tokens = list(range(8))
    layers = {
        0: (numbers(1, 8, 2, 4), numbers(2, 8, 2, 4)),
        1: (numbers(3, 5, 2, 4), numbers(4, 5, 2, 4)),
    }
    state = {(2, "conv"): numbers(5, 3, 2, dtype="float32")}
    tier = f"file://{folder / 'snapshots'}?size=16MiB&codec=lossless"
    with KVStore(geometry, model="tiny@1", block_tokens=4, tiers=["memory://1MiB", tier]) as opened:
        first = opened.window_start(1, 8)
        layers[1] = tuple(part[: 8 - first] for part in layers[1])
        opened.put_snapshot(tokens, Snapshot(8, 0, layers, state), wait=True)
        opened.flush()
    note(folder, "snapshots.json", {
        "tokens": tokens,
        "layers": {str(at): [plain(bytes_of(one)) for one in layers[at]] for at in layers},
        "state": {"2 conv": plain(bytes_of(state[2, "conv"]))},
    })  # fmt: skip


# --- records, one of each codec --------------------------------------------------------------


def codecs(folder: Path) -> None:
    place = folder / "codecs"
    place.mkdir()
    raw = bytes_of(numbers(7, 2, 24, 2, 16) / 64 - 2)
    expected = {}
    names = ("raw", "lossless", "int8", "fp8", "int4")
    made = {name: make_codec(name, SHAPE) for name in names}
    made |= {f"encrypted-{name}": make_codec(name, SHAPE, KEY) for name in ("raw", "int8")}
    made["encrypted-raw-without-id"] = EncryptedCodec(make_codec("raw", SHAPE), KEY, with_id=False)
    for name, codec in made.items():
        records = RecordCodec(codec, lambda number: None)
        memory = memoryview(bytearray(HEADER_BYTES + len(raw)))
        memory[HEADER_BYTES:] = raw
        record = bytes(records.encode(BLOCK, memory))
        (place / f"{name}.record").write_bytes(record)
        header, found = records.verify(BLOCK, memoryview(bytearray(record)))
        again = records.decode_alone(found, header, memoryview(bytearray(record)))
        decoded = bytes(again[HEADER_BYTES:])
        expected[name] = {"number": header.codec, "decoded": digest_of(decoded)}
    note(folder, "codecs.json", {"block": BLOCK.hex(), "raw": plain(raw), "records": expected})
    (folder / "encryption.key").write_text(KEY.hex() + "\n")


# --- memory of a node ------------------------------------------------------------------------


def arena(folder: Path) -> None:
    records = {bytes([number]) * 48: bytes(numbers(number, 300).to(torch.uint8).numpy().tobytes())
               for number in (1, 2)}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,
        ShmBackend(64 << 10, directory=directory, records=16) as backend,
    ):
        for block, record in records.items():
            with backend.reserve(block, len(record)) as draft:
                draft.record[:] = record
                draft.commit()
        backend.close()
        content = Path(backend.path).read_bytes()
    (folder / "arena.gz").write_bytes(gzip.compress(content, mtime=0))
    note(folder, "arena.json", {
        "records": {block.hex(): plain(record) for block, record in records.items()},
    })  # fmt: skip


# --- other files -----------------------------------------------------------------------------


class _Log:
    unit_tokens = 4
    name = "a log"
    length = None

    def __iter__(self):
        for number in range(24):
            tokens = np.arange(8 + 4 * (number % 5) + number // 5, dtype=np.int32) + number % 3
            served = Served(4, 4, 0.25, 1.5) if number % 4 == 1 else None
            answer = chain_tokens(np.arange(8, dtype=np.int32) + number, 4)[-1:]
            yield TraceRequest(
                number / 2, chain_tokens(tokens, 4), len(tokens), 5, "acme" * (number % 2),
                f"s{number % 3}", None, number // 3 + 1, "agent", answer, number != 7, served,
                "tool_use", 0.5, None, number,
            )  # fmt: skip


def trace(folder: Path) -> None:
    write_trace(_Log(), folder / "trace.jsonl")
    write_trace(_Log(), folder / "trace.jsonl.gz")
    rows = []
    for request in _Log():
        row = asdict(request)
        row["units"] = request.units.tolist()
        row["answer"] = None if request.answer is None else request.answer.tolist()
        rows.append(row)
    note(folder, "trace.json", {"unit_tokens": 4, "requests": rows})


def costs(folder: Path) -> None:
    prefill = PrefillCost(
        seconds_fixed=0.01, seconds_per_token=0.001, seconds_per_token_pair=1e-8,
        decode_seconds_per_token=0.03, kv_bytes_per_token=512.0, name="a machine",
    )  # fmt: skip
    reads = {"file": TransferCost(seconds_fixed=0.001, seconds_per_byte=1e-9)}
    writes = {"file": TransferCost(seconds_fixed=0.002, seconds_per_byte=2e-9)}
    written = {"kvkeep_cost": 1, **asdict(prefill)}
    (folder / "prefill.json").write_text(json.dumps(written, indent=2) + "\n")
    CostModel(prefill, reads=reads, writes=writes, model="m").write(folder / "cost.json")
    CostModel(reads=reads, model="m").write(folder / "reads.json")
    note(folder, "costs.json", {
        "prefill": asdict(prefill), "model": "m",
        "reads": {"file": asdict(reads["file"])}, "writes": {"file": asdict(writes["file"])},
    })  # fmt: skip


def weights(folder: Path) -> None:
    place = folder / "weights"
    place.mkdir()
    save_file({"embed": numbers(1, 64, 32), "norm": numbers(2, 32)}, place / "model.safetensors")
    note(folder, "weights.json", {"digest": weights_digest(place / "model.safetensors")})


def events(folder: Path) -> None:
    batch = Batch(
        1234.5,
        [
            BlockStored([1, b"\x07" * 32], None, list(range(32)), 16, None, "GPU", "an adapter",
                        [["salt"], None], 0, "full_attention"),
            BlockStored([3], 1, list(range(16)), 16, 2, None, None),
            BlockRemoved([1], "CPU"),
            AllBlocksCleared(),
        ],
        3,
    )  # fmt: skip
    (folder / "events.bin").write_bytes(encode(batch))
    rows = [{"type": type(one).__name__, **msgspec.structs.asdict(one)} for one in batch.events]
    for row in rows:
        hashes = row.get("block_hashes", [])
        row["block_hashes"] = [one if isinstance(one, int) else one.hex() for one in hashes]
    note(folder, "events.json", {"ts": batch.ts, "rank": 3, "events": rows})


def settings(folder: Path) -> None:
    (folder / "settings.toml").write_text(
        '[serve]\nport = 8000\nmemory = "8GiB"\n'
        'tier = ["memory://4GiB", "file:///var/lib/kvkeep?size=200GiB"]\n\n'
        '[route]\nport = 8080\ninstances = ["http://127.0.0.1:8001"]\n'
    )
    lines = ["[5, 6, 7]", "", "[1]"]
    (folder / "prefixes.jsonl").write_text("\n".join(lines) + "\n")
    note(folder, "settings.json", {
        "serve": {"port": 8000, "memory": "8GiB",
                  "tier": ["memory://4GiB", "file:///var/lib/kvkeep?size=200GiB"]},
        "route": {"port": 8080, "instances": ["http://127.0.0.1:8001"]},
        "prefixes": [[5, 6, 7], [1]],
    })  # fmt: skip


KINDS: tuple[Callable[[Path], None], ...] = (
    keys, store, snapshots, codecs, arena, trace, costs, weights, events, settings,
)  # fmt: skip


def make(folder: Path) -> None:
    """Write all fixtures into the new ``folder``."""
    folder.mkdir(parents=True)
    for kind in KINDS:
        kind(folder)
    for tier in ("store", "snapshots"):  # Git keeps no empty folders
        for empty in ("tmp", "quarantine"):
            (folder / tier / empty).rmdir()


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else version("kvkeep")
    place = FORMATS / name
    if place.exists():
        sys.exit(f"{place} is there already; delete it first, unless that version was released")
    make(place)
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    print(f"{place}: {size:,} bytes")
