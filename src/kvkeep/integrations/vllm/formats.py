"""Which versions of vLLM write equal pages, so that an upgrade between them keeps the cache warm.

A page holds what a version of vLLM computes, in the order in which its kernels pack it. Both may
change with a version, so its number belongs to the namespace, unless equality is proven. The proofs
are in ``formats.json``, written by ``tests_vllm/page_fixtures.py`` in the environment of each
version, and checked there again by the tests:

    packings   keys and values, given to the kernel that writes pages: the digest of the bytes, for
               each dtype, size of heads and tokens of a block
    models     a small model of each kind, with prompts and answers: the digest of all its pages,
               and, since 0.31, of all its rows below vLLM's offloading
    order      the digest of the rows of a model with twelve layers: which layer is where

An engine is named by these digests in place of its version, if its version has both, computed on
such a machine and by this torch; if its model has the kind of a fixture, which is its configuration
without sizes; and if all other settings that decide numbers are those of that fixture. Else it is
named by its version: a cold cache is better than a wrong byte.

Equal bytes of a small model do not prove that a large one is rounded alike. It is a difference as
between two batches, which vLLM's own prefix cache does not distinguish either.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from kvkeep.integrations.vllm.groups import Groups

__all__ = [
    "CONFIGURATION",
    "PageFormat",
    "kind_of",
    "packing_of",
    "packings_of",
    "page_format",
    "settings_of",
]

CONFIGURATION: Final = ("hf", "hf_text", "longest")  # of the model; it stays in the namespace
_LOADED: Final = {"dtype", "torch_dtype"}  # of the files: vLLM converts what it loads
_FIXTURE: Final = ("dtype", "mode", "kind")  # what names a fixture in all versions
_SHOWN: Final = 4
# By what is proven: where a fixture has its digest, its first version, and its settings.
_PARTS: Final = {
    "pages": ("pages", "as", "settings"),
    "rows": ("rows", "rows as", "row settings"),
}
_PACKED: Final = {
    "pages": "several ranks, states, latent KV or unequal keys and values are not proven",
    "rows": "only rows in the canonical layout, of chunks of one block, whose keys and values are "
    "equal in size, are proven",
}


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The name of an engine's computation of pages, in a namespace.

    Attributes:
        name: equal where pages are equal.
        versions: the versions of vLLM that are proven to write such pages; none: no proof applies.
        reason: why none does; empty if one does.
    """

    name: str
    versions: tuple[str, ...] = ()
    reason: str = ""


def page_format(
    numbers: Mapping[str, Any],
    dtype: str,
    packings: Sequence[str] | None,
    machine: str,
    of: Literal["pages", "rows"] = "pages",
) -> PageFormat:
    """Return the name of the pages of an engine with these settings, or of its rows.

    ``numbers`` are those of `kvkeep.integrations.vllm.numbers.numbers_of`, for rows with
    ``any_ranks``; ``dtype`` is that of the namespace, ``packings`` are those of `packings_of`, and
    ``machine`` is that of `kvkeep.integrations.vllm.naming.machine_of`.
    """
    digest, first, _ = _PARTS[of]
    proofs = [proof for proof in _proofs() if proof["machine"] == machine]
    here = (vllm.__version__, str(torch.__version__))
    model, reason = None, f"vLLM {here[0]} with torch {here[1]} is not proven on {machine}"
    for proof in proofs:
        if (proof["vllm"], proof["torch"]) == here:
            model, reason = _fixture(proof, numbers, dtype, packings, of)
    if model is None or packings is None:
        settings = _digest(settings_of(numbers))
        return PageFormat(f"vLLM {here[0]}, torch {here[1]}; settings {settings}", reason=reason)
    # What a proof says of an engine; the same in all versions that write equal pages.
    said = {
        proof["vllm"]: [
            _found(proof, model, digest),
            *([proof.get("order")] if of == "rows" else []),
            *(proof["packings"].get(each) for each in packings),
        ]
        for proof in proofs
    }
    name = _digest([{part: model[part] for part in _FIXTURE}, packings, said[here[0]]])
    equal = tuple(version for version, pages in said.items() if pages == said[here[0]])
    return PageFormat(f"{of} as vLLM {model[first]} {name}", equal)


def packings_of(vllm_config: VllmConfig, groups: Groups) -> list[str] | None:
    """Return how the pages of all layers are packed; None: in a way that no fixture shows."""
    if vllm_config.parallel_config.world_size != 1:
        return None
    layers = vllm_config.compilation_config.static_forward_context
    found: set[str] = set()
    for name in (name for group in groups.groups for name in group.layers):
        packing = packing_of(layers[name].get_kv_cache_spec(vllm_config), groups.block_tokens)
        if packing is None:
            return None
        found.add(packing)
    return sorted(found)


def packing_of(spec: KVCacheSpec, block_tokens: int) -> str | None:
    """Return how the pages of a layer are packed; None: in a way that no fixture shows."""
    if type(spec) not in {FullAttentionSpec, SlidingWindowSpec}:
        return None
    assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
    if spec.head_size != spec.head_size_v:
        return None
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{dtype} {spec.head_size} {block_tokens}"


def settings_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide numbers, without the model's configuration and versions."""
    kept = {name: value for name, value in numbers.items() if name not in CONFIGURATION}
    del kept["vllm"]
    return kept | {"torch": numbers["torch"][1:]}


def kind_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's configuration without its sizes: what the code branches on."""
    kept = {name: _kind(numbers[name]) for name in CONFIGURATION}
    assert all(isinstance(kept[name], dict) for name in ("hf", "hf_text"))
    if kept["hf"] == kept["hf_text"]:
        del kept["hf_text"]
    return kept


def _kind(value: Any) -> Any:
    """Return ``value`` with one name for all numbers, except zero, and without repetitions."""
    if isinstance(value, dict):
        return {name: _kind(each) for name, each in value.items() if name not in _LOADED}
    if isinstance(value, list):
        kinds = {json.dumps(_kind(each), sort_keys=True) for each in value}
        return [json.loads(kind) for kind in sorted(kinds)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return "a number" if value else 0


def _fixture(
    proof: Mapping[str, Any],
    numbers: Mapping[str, Any],
    dtype: str,
    packings: Sequence[str] | None,
    of: str,
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the fixture that proves an engine's pages or rows, or None and why there is none."""
    if packings is None:
        return None, _PACKED[of]
    digest, _, settings = _PARTS[of]
    models = [model for model in proof["models"] if digest in model]
    if not models:
        return None, f"there is no proof of {of} for vLLM {proof['vllm']}"
    lacking = [packing for packing in packings if packing not in proof["packings"]]
    if lacking:
        kept, head, tokens = lacking[0].split()
        return None, f"pages of {kept}, heads of {head} and blocks of {tokens} are not proven"
    mine = {"dtype": dtype, "mode": _mode(numbers), "kind": kind_of(numbers)}
    mine |= {"settings": settings_of(numbers)}
    near: list[str] | None = None
    for model in models:
        shown = {part: model[part] for part in _FIXTURE}
        unlike = _unlike(shown | {"settings": proof["settings"][model[settings]]}, mine, "")
        if not unlike:
            return model, ""
        if near is None or len(unlike) < len(near):
            near = unlike
    assert near, "a proof has models"
    more = f" and {len(near) - _SHOWN} more" if len(near) > _SHOWN else ""
    return None, f"it differs from the most similar fixture in {', '.join(near[:_SHOWN])}{more}"


def _found(proof: Mapping[str, Any], like: Mapping[str, Any], digest: str) -> str | None:
    """Return a digest of the fixture as ``like`` in another proof; None if it has none."""
    for model in proof["models"]:
        if all(model[part] == like[part] for part in _FIXTURE):
            found: str | None = model.get(digest)
            return found
    return None


def _mode(numbers: Mapping[str, Any]) -> object:
    """Return how vLLM compiles the model: another mode is another format, whatever it writes."""
    return numbers["compilation"][0]


def _unlike(left: Any, right: Any, path: str) -> list[str]:
    """Return the paths at which two values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            each
            for name in sorted(left.keys() | right.keys())
            for each in _unlike(left.get(name, "absent"), right.get(name, "absent"),
                                f"{path}.{name}" if path else name)
        ]  # fmt: skip
    return [] if left == right else [path]


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _proofs() -> list[dict[str, Any]]:
    text = files("kvkeep.integrations.vllm").joinpath("formats.json").read_text()
    proofs: list[dict[str, Any]] = json.loads(text)["proofs"]
    return proofs
