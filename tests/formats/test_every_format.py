"""Files of this version and of earlier ones, as `make.py` wrote them: read by the code of today.

Each folder beside this file is a version. Every reader gives, byte for byte, what the version put
in. docs/reference/formats.md promises it, and says what to do when a test here fails.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from kvkeep.bench.traces import open_trace
from kvkeep.cli import main
from kvkeep.cli.config_file import ConfigFile
from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.core.extras import as_extras
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.core.keys import Namespace, chain_keys, root_key, space_of
from kvkeep.core.public import read_prefixes
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.kv_events.wire import decode, encode, salt_digest
from kvkeep.store import KVStore
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.backends.shm.segment import Layout
from kvkeep.store.codecs import BlockShape, codec_name, make_codec
from kvkeep.store.codecs.encrypted import load_key
from kvkeep.store.codecs.named import codec_of
from kvkeep.store.identity.files import weights_digest
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.record_codec import NotForUs, RecordCodec

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = Path(__file__).parent
VERSIONS = sorted(
    (folder for folder in FORMATS.iterdir() if folder.name[0].isdigit()),
    key=lambda folder: [int(part) for part in folder.name.split(".")],
)
NEWEST = VERSIONS[-1]
SHAPE = BlockShape("bfloat16", "NHD", ((2, 16), (2, 16)))


def expected(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def plain(text: str) -> bytes:
    return base64.b64decode(text)


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def private(source: Path, target: Path) -> Path:
    """A copy that its owner alone can read; of a folder without files, Git keeps nothing."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    target.chmod(0o700 if target.is_dir() else 0o600)
    return target


def command(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- readers: one a kind ---------------------------------------------------------------------


def read_keys(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = expected(folder, "keys.json")
    for chain in found["chains"]:
        namespace = Namespace(**chain["namespace"])
        root = root_key(namespace)
        assert namespace.canonical() == plain(chain["canonical"])
        assert (root.hex(), space_of(namespace).hex()) == (chain["root"], chain["space"])
        raw, size = as_tokens(chain["tokens"]).tobytes(), 4 * chain["block_tokens"]
        extra = as_extras([(at, plain(data)) for at, data in chain["extra"]], len(raw) // 4)
        assert [key.hex() for key in chain_keys(root, raw, size)] == chain["keys"]
        marked = chain_keys(root, raw, size, extra)
        assert [key.hex() for key in marked] == chain["keys_with_extra"]
    salt, digest = found["salt"]
    assert salt_digest(salt) == digest


def read_store(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of a disk tier: by the commands, by the backend, by a store."""
    want = expected(folder, "store.json")
    place = private(folder / "store", tmp_path / "store")
    url = f"file://{place}?size=16MiB"
    blocks = {bytes.fromhex(block): size for block, size in want["blocks"].items()}

    (tier,) = command(capsys, "store", "ls", url)["tiers"]
    assert (tier["blocks"], tier["odd"]) == (len(blocks), 0)
    assert tier["last_budget"]["bytes"] == want["budget"]
    assert tier["last_budget"]["given"]
    assert tier["codecs"] == {"raw": min(32, len(blocks))}
    (tier,) = command(capsys, "store", "verify", url)["tiers"]
    assert (tier["sound"], tier["other_version"], tier["bad"]) == (len(blocks), 0, 0)

    with DiskBackend(place) as backend:
        assert {one.block: one.size for one in backend.list()} == blocks
        assert backend.used() == 4096 * len(blocks)
        noted = {space.hex(): note.decode() for space, note in backend.noted_spaces().items()}
        assert noted == want["spaces"]

    geometry = KVGeometry(**want["geometry"])
    with KVStore(geometry, tiers=["memory://1MiB", url], **want["options"]) as store:
        store.public.declare(want["public"])
        for prompt in want["prompts"]:
            extra = [(at, plain(data)) for at, data in prompt["extra"]]
            kv, count = store.get(prompt["tokens"], tenant=prompt["tenant"], extra=extra)
            assert count == len(prompt["tokens"])
            assert bytes_of(kv) == plain(prompt["kv"])
        counters = store.stats().tiers[1].counters
        assert (counters["damaged"], counters["refused"]) == (0, 0)
        assert counters["hits"] == len(blocks)


def read_snapshots(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = expected(folder, "snapshots.json")
    place = private(folder / "snapshots", tmp_path / "snapshots")
    heads = AttentionShape(2, 4)
    geometry = KVGeometry.of(
        (
            LayerGroup("full", (0,), heads),
            LayerGroup("window", (1,), heads, 6),
            LayerGroup("state", (2,), state=(StateTensor("conv", (3, 2), "float32"),)),
        ),
        dtype="bfloat16",
    )
    tiers = ["memory://1MiB", f"file://{place}?size=16MiB&codec=lossless"]
    with KVStore(geometry, model="tiny@1", block_tokens=4, tiers=tiers) as store:
        found = store.get_snapshot(want["tokens"])
        assert found is not None
        assert found.tokens == len(want["tokens"])
        layers = {str(at): list(map(bytes_of, parts)) for at, parts in found.layers.items()}
        assert layers == {at: list(map(plain, parts)) for at, parts in want["layers"].items()}
        state = {f"{at} {name}": bytes_of(one) for (at, name), one in found.state.items()}
        assert state == {name: plain(one) for name, one in want["state"].items()}


def read_codecs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of each codec, by the codec that its number names."""
    want = expected(folder, "codecs.json")
    key = load_key(private(folder / "encryption.key", tmp_path / "key"))
    block = bytes.fromhex(want["block"])
    for name, one in want["records"].items():
        record = (folder / "codecs" / f"{name}.record").read_bytes()
        number = one["number"]
        codec = codec_of(number, SHAPE, key)
        if name == "transform":  # a codec that no longer exists
            assert (codec, codec_name(number)) == (None, name)
            records = RecordCodec(make_codec("raw", SHAPE), lambda _: None)
            with pytest.raises(NotForUs, match="transform, is unknown here"):
                records.verify(block, memoryview(bytearray(record)))
            continue
        assert codec is not None
        assert codec.number == number
        records = RecordCodec(codec, lambda _: None)
        header, found = records.verify(block, memoryview(bytearray(record)))
        assert header.raw_bytes == len(plain(want["raw"]))
        decoded = records.decode_alone(found, header, memoryview(bytearray(record)))
        assert digest_of(decoded[HEADER_BYTES:]) == one["decoded"], name
        if codec.exact:
            assert decoded[HEADER_BYTES:] == plain(want["raw"])


def arena_at(folder: Path, tmp_path: Path) -> Path:
    """The arena's file, where `ShmBackend` looks for it in ``tmp_path``."""
    path = tmp_path / f"kvkeep-{os.geteuid()}-kvkeep"
    path.write_bytes(gzip.decompress((folder / "arena.gz").read_bytes()))
    path.chmod(0o600)
    return path


def read_arena(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if sys.platform != "linux" or sys.byteorder != "little":
        pytest.skip("an arena never leaves its machine; this one was made on another kind")
    arena_at(folder, tmp_path)
    want = expected(folder, "arena.json")
    with ShmBackend(None, directory=str(tmp_path)) as backend:
        for block, record in want["records"].items():
            found = backend.get(bytes.fromhex(block), aligned)
            assert found is not None
            assert bytes(found) == plain(record)
        backend.check()


def read_trace(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = expected(folder, "trace.json")
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        trace = open_trace(folder / name)
        assert (trace.format, trace.unit_tokens) == ("kvkeep", want["unit_tokens"])
        for request, row in zip(trace, want["requests"], strict=True):
            found = asdict(request)
            found["units"] = request.units.tolist()
            found["answer"] = None if request.answer is None else request.answer.tolist()
            assert found == {**found, **row}
    replayed = ["replay", str(folder / "trace.jsonl"), "--capacity", "64", "--policy", "lru"]
    assert main([*replayed, "--page", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[0])
    assert answer["requests"] == len(want["requests"])


def read_costs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = expected(folder, "costs.json")
    assert asdict(CostModel.read(folder / "prefill.json").prefill.cost) == want["prefill"]
    for name, has_prefill in (("cost.json", True), ("reads.json", False), ("prefill.json", True)):
        found = CostModel.read(folder / name)
        assert found.prefill.known is has_prefill
        if has_prefill:
            seconds = PrefillCost(**want["prefill"]).prefill_s(0, 1000)
            assert found.prefill.prefill_s(0, 1000) == pytest.approx(seconds, rel=1e-3)
        if name != "prefill.json":
            assert found.model == want["model"]
            took = want["reads"]["file"]
            seconds = took["seconds_fixed"] + took["seconds_per_byte"] * (1 << 20)
            assert found.reads()["file"].seconds(1 << 20) == pytest.approx(seconds, rel=1e-3)


def read_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = expected(folder, "weights.json")
    assert weights_digest(folder / "weights" / "model.safetensors") == want["digest"]


def read_events(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = expected(folder, "events.json")
    payload = (folder / "events.bin").read_bytes()
    batch, skipped = decode(payload)
    assert (batch.ts, batch.data_parallel_rank, skipped) == (want["ts"], want["rank"], 0)
    for event, row in zip(batch.events, want["events"], strict=True):
        found = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
        hashes = found.get("block_hashes", [])
        found["block_hashes"] = [one if isinstance(one, int) else one.hex() for one in hashes]
        assert found == {**found, **row}
    assert encode(batch) == payload


def read_settings(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = expected(folder, "settings.json")
    file = ConfigFile.read(folder / "settings.toml")
    for section in file.sections:
        found = {one.key: one.value for one in file.section(section).values()}
        assert found == want[section]
    assert command(capsys, "config", "check", str(folder / "settings.toml"))["mistakes"] == []
    prefixes = read_prefixes(folder / "prefixes.jsonl", None)
    assert [prefix.tolist() for prefix in prefixes] == want["prefixes"]


READERS: dict[str, Callable[[Path, Path, pytest.CaptureFixture[str]], None]] = {
    "keys.json": read_keys,
    "store.json": read_store,
    "snapshots.json": read_snapshots,
    "codecs.json": read_codecs,
    "arena.json": read_arena,
    "trace.json": read_trace,
    "costs.json": read_costs,
    "weights.json": read_weights,
    "events.json": read_events,
    "settings.json": read_settings,
}
"""By the file that has what is expected. A version before a format was made lacks its file."""


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_what_a_version_wrote_is_read(
    folder: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (folder / name).exists():
        assert folder != NEWEST
        pytest.skip("this version had no such format")
    READERS[name](folder, tmp_path, capsys)


# --- what is written today -------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixtures that `make.py` would write today."""
    from make import make

    folder = tmp_path_factory.mktemp("formats") / "now"
    make(folder)
    return folder


SAME = (
    "keys.json", "store/FORMAT", f"store/{'?' * 32}/*", "snapshots/FORMAT",
    "snapshots.json",
    "codecs/raw.record", "trace.jsonl", "prefill.json", "weights.json",
    "events.bin",
)  # fmt: skip
"""Files whose every byte the format decides: no compressor, no clock, no sum, no random number."""


def test_a_changed_format_has_a_new_number(written: Path) -> None:
    """If this fails, an older kvkeep may misread what this one writes: see the page on formats."""
    for pattern in SAME:
        names = {file.relative_to(NEWEST) for file in NEWEST.glob(pattern)}
        assert names
        assert {file.relative_to(written) for file in written.glob(pattern)} == names
        for name in names:
            assert (written / name).read_bytes() == (NEWEST / name).read_bytes(), (
                f"{name} is not what {NEWEST.name} wrote: docs/reference/formats.md says what a "
                "changed format needs"
            )
    # A directory is listed in any order.
    assert expected(written, "store.json") == expected(NEWEST, "store.json")
    for name in ("cost.json", "reads.json"):  # what was fitted differs in its last digits
        assert _fields(expected(written, name)) == _fields(expected(NEWEST, name))
    if sys.platform == "linux" and sys.byteorder == "little":
        assert _arena(written) == _arena(NEWEST)


def _arena(folder: Path) -> bytes:
    """The bytes of an arena without the times of last use."""
    content = bytearray(gzip.decompress((folder / "arena.gz").read_bytes()))
    layout = Layout.parse(content[:4096])
    begin, end = layout.column_at("used"), layout.column_at("pinned")
    content[begin:end] = bytes(end - begin)
    return bytes(content)


def _fields(found: Any) -> Any:
    """The same with each number replaced by its type."""
    if isinstance(found, dict):
        return {name: _fields(one) for name, one in found.items()}
    return found if isinstance(found, str) else type(found)


def test_the_fixtures_are_complete_and_small(written: Path) -> None:
    def kinds(folder: Path) -> set[str]:
        files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        return {str(file) for file in files if file.parts[0] not in ("store", "snapshots")}

    old = {f"codecs/{name}.record" for name in ("transform", "int4-2", "int4-5", "int4-6")}
    assert kinds(NEWEST) - old == kinds(written)  # those are read, and no longer written
    for folder in VERSIONS:
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        assert sum(sizes) < 100 << 10
