"""Rows below vLLM's offloading: which versions are proven equal, and what an upgrade finds."""

from __future__ import annotations

import logging
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import page_fixtures
import pytest
import vllm
from engines import BLOCK, LENGTHS, PROMPTS, Answer, same
from page_fixtures import PROOFS
from test_formats import numbers_of
from test_rank_names import named
from tiered import tiered

from kvkeep.integrations.vllm.formats import PageFormat, page_format
from kvkeep.integrations.vllm.offload import identity, spec

if TYPE_CHECKING:
    from pathlib import Path


def asked(proof: dict[str, Any], packings: list[str] | None = None, **other: Any) -> PageFormat:
    """The name of the rows of the first fixture."""
    model = proof["models"][0] | {"settings": proof["models"][0]["row settings"]}
    given = {"dtype": model["dtype"], "machine": proof["machine"]} | other
    return page_format(numbers_of(proof, model), packings=packings, **given, of="rows")


PACKED = ["bfloat16 128 32"]


@pytest.mark.parametrize("name", ["llama3", page_fixtures.DEEP])
def test_this_version_still_writes_the_rows_that_are_proven(
    proof: dict[str, Any], tmp_path: Path, name: str
) -> None:
    found = page_fixtures.written_rows(name, "bfloat16", compiled=False, directory=tmp_path)
    if found["machine"] != proof["machine"]:
        pytest.skip(f"the proofs are of {proof['machine']}")
    if name == page_fixtures.DEEP:
        assert found["rows"] == proof["order"]
        return
    (model,) = [
        model
        for model in proof["models"]
        if (model["name"], model["dtype"], model["mode"]) == (name, found["dtype"], found["mode"])
    ]
    assert model["rows"] == found["rows"]
    assert proof["settings"][model["row settings"]] == found["settings"]


def test_proofs_are_of_other_bytes_than_those_of_pages_and_numbers() -> None:
    for proof in PROOFS:
        rows = [model["rows"] for model in proof["models"] if "rows" in model]
        assert len(rows) in {0, len(proof["models"])}
        assert not set(rows) & {model["pages"] for model in proof["models"]}
        assert proof.get("order") not in rows
        assert len(set(rows)) >= len(rows) / 2


@pytest.mark.parametrize("what", ["rows", "order", "packing", "none"])
def test_other_rows_have_another_name(
    proof: dict[str, Any], proofs: list[dict[str, Any]], what: str
) -> None:
    older = deepcopy(proof) | {"vllm": "0.1.0"}
    proofs += [older, proof]
    equal = asked(proof, PACKED)
    assert equal.versions == ("0.1.0", proof["vllm"])
    assert equal.name.startswith("rows as vLLM ")
    if what == "rows":
        older["models"][0]["rows"] = "0" * 32
    elif what == "order":
        older["order"] = "0" * 32
    elif what == "packing":
        older["packings"]["bfloat16 128 32"] = "0" * 32
    else:
        for model in older["models"]:
            del model["rows"]
    assert asked(proof, PACKED) == PageFormat(equal.name, (proof["vllm"],))


def test_rows_that_are_not_proven_are_named_by_their_version(
    proof: dict[str, Any], proofs: list[dict[str, Any]]
) -> None:
    proofs += [deepcopy(proof) | {"vllm": "0.1.0"}, proof]
    for packings, other, reason in (
        (None, {}, "only rows in the canonical layout, of chunks of one block"),
        (["bfloat16 72 32"], {}, "heads of 72 and blocks of 32 are not proven"),
        (PACKED, {"machine": "cuda x86_64 FLASH_ATTN"}, "is not proven on cuda"),
    ):
        found = asked(proof, packings, **other)
        assert not found.versions
        assert reason in found.reason
        assert found.name.startswith(f"vLLM {proof['vllm']}, torch {proof['torch']}; settings ")
    for model in proof["models"]:
        del model["rows"]
    assert "there is no proof of rows for vLLM" in asked(proof, PACKED).reason


def test_what_is_stored_in_other_rows_is_not_proven() -> None:
    """Chunks of several blocks, several stages or contexts, and layers with states."""
    caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=object())])
    for blocks, stages, contexts in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)):
        parallel = SimpleNamespace(world_size=2 * stages, tensor_parallel_size=2,
                                   decode_context_parallel_size=contexts)  # fmt: skip
        engine: Any = SimpleNamespace(
            config=SimpleNamespace(parallel_config=parallel), caches=caches
        )
        groups = [SimpleNamespace(group_id=0, tokens_per_block=32)]
        cache = SimpleNamespace(blocks_per_chunk=blocks)
        rows: Any = SimpleNamespace(config=SimpleNamespace(groups=groups, cache=cache))
        assert identity._packings(engine, rows) is None


def test_an_upgrade_finds_rows_that_are_proven_equal_and_says_why_else(
    llama: str, proof: dict[str, Any], proofs: list[dict[str, Any]], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    unlike = deepcopy(proof) | {"vllm": "99.0", "order": "0" * 32}
    proofs += [proof, deepcopy(proof) | {"vllm": "98.0"}, unlike]
    caplog.set_level(logging.INFO, "kvkeep")
    answers: dict[str, list[Answer]] = {}
    said = {}
    for version in (proof["vllm"], "98.0", "99.0", "100.0"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(vllm, "__version__", version)
            # Names are compared here, and this machine may be another one than that of the proof.
            patched.setattr(spec, "machine_of", lambda *_: proof["machine"])
            with tiered(llama, f"file://{tmp_path}/kv?size=256MiB") as one:
                answers[version] = one.ask(PROMPTS[-2:])
                mine = one.store.namespace
                assert [named(one, ranks, portable=True) for ranks in (1, 2, 4)] == [mine] * 3
        same(answers[proof["vllm"]], answers[version])
        said[version] = caplog.text
        caplog.clear()
    found = [[answer.cached for answer in each] for each in answers.values()]
    assert found == [[0, 0], [length // BLOCK * BLOCK for length in LENGTHS[-2:]], [0, 0], [0, 0]]
    assert f"shares pages with vLLM {proof['vllm']}, 98.0: proven equal" in said["98.0"]
    assert "geometry is 'rows as vLLM" in said["99.0"]
    assert "is cold after an upgrade: vLLM 100.0 with torch" in said["100.0"]
