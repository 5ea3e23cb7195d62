"""The names of blocks: from tokens, and from what the store is of."""

from __future__ import annotations

import hashlib
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.core.extras import extra_bytes, extras_between
from kvkeep.core.keys import Namespace, chain_keys, root_key, space_of
from kvkeep.core.tokens import TOKEN_BYTES
from kvkeep.store.identity import model_identity

if TYPE_CHECKING:
    from kvkeep.core.extras import Extras
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.forms import Layout

__all__ = ["Names", "store_namespace"]


def store_namespace(
    geometry: KVGeometry,
    layout: Layout,
    block_tokens: int,
    *,
    model: str | torch.nn.Module,
    revision: str,
    tenant: str,
    lora: str,
    rank: str,
) -> Namespace:
    """The namespace of a store: everything that makes KV another KV.

    ``model`` is a loaded module or a model directory, whose identity is then taken,
    ``name@revision``, or a name with ``revision`` given.

    Raises:
        InvalidValue: it is not said which model, or which rank of several.
    """
    model, revision = _named(model, revision)
    if not model or not revision:
        raise InvalidValue(
            f"model is {model!r} without a revision; KV of other weights under the same name would "
            "be taken for its own: write 'name@revision', give revision=, the loaded model "
            "itself, or its directory"
        )
    if geometry.tp > 1 and not rank:
        raise InvalidValue(
            f"{geometry.tp} tensor-parallel ranks share the model; say which one this is, such as "
            f"rank='tp0/{geometry.tp}'"
        )
    heads = f"{geometry.layers}x{geometry.rank_heads}x{geometry.head_dim}"
    if geometry.latent_dim is not None:
        heads += f"/latent{geometry.latent_dim}"
    elif geometry.value_dim != geometry.head_dim:
        heads += f"/v{geometry.value_dim}"
    return Namespace(
        tenant=tenant,
        model=model,
        revision=revision,
        dtype=geometry.dtype,
        layout=f"{layout}/{block_tokens}",
        geometry=heads,
        lora=lora,
        rank=rank,
    )


def _named(model: str | torch.nn.Module, revision: str) -> tuple[str, str]:
    """The name and the revision that ``model`` and ``revision`` say."""
    if isinstance(model, torch.nn.Module):
        if revision:
            raise InvalidValue(
                f"revision is {revision!r} beside a loaded model, which has an identity of its "
                "own; leave revision out, or give the model's name"
            )
        name = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
        return str(name), model_identity(model)
    if not isinstance(model, str):
        raise InvalidValue(
            f"model is {model!r}; it is a torch.nn.Module, 'name@revision', or a directory"
        )
    # A directory first: its path may have an "@" that parts no revision from a name.
    if model and not revision and Path(model).is_dir():
        folder = Path(model).resolve()
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise InvalidValue(
                f"{folder} holds an adapter without the model that it changes; give the loaded "
                "model, or a name and a revision for both"
            )
        return folder.name, model_identity(folder)
    if not revision and "@" in model:
        model, _, revision = model.rpartition("@")
    return model, revision


class Names:
    """The block ids of one namespace, of prompts without extras or, `having` them, of one with."""

    __slots__ = ("_block_bytes", "_extras", "_root", "block_tokens", "space")

    def __init__(self, namespace: Namespace, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.space = space_of(namespace)
        self._root = root_key(namespace)
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._extras: Extras = ()

    def having(self, extras: Extras) -> Names:
        """The names of a prompt with these extras; positions count from its first token."""
        if not extras:
            return self
        names = copy(self)
        names._extras = extras
        return names

    @property
    def root(self) -> bytes:
        """What stands before the first block, as if it were one."""
        return self.space + self._root

    def full(self, tokens: TokenArray) -> list[bytes]:
        """Ids of the full blocks of a prompt. Cost: a SHA-256 each, about 1 µs for 256 tokens."""
        space = self.space
        keys = chain_keys(self._root, tokens.tobytes(), self._block_bytes, self._extras)
        return [space + key for key in keys]

    def tails(
        self, blocks: list[bytes], tokens: TokenArray, *, start: int | None = None
    ) -> list[bytes]:
        """Ids of all tails that may follow ``blocks``: of ``tokens[:1]``, ``tokens[:2]``, …

        ``start`` is where in the prompt they begin; without it ``blocks`` are all that come before
        them, with it the last one is enough. A tail's key is hashed as a block's is. Cost: about
        1 µs each.
        """
        parent = blocks[-1][len(self.space) :] if blocks else self._root
        digest = hashlib.sha256(parent)
        raw = tokens.tobytes()
        ids = []
        if self._extras:
            start = len(blocks) * self.block_tokens if start is None else start
            extras = extras_between(self._extras, start, start + len(tokens))
            for length in range(1, len(tokens) + 1):
                digest.update(raw[(length - 1) * TOKEN_BYTES : length * TOKEN_BYTES])
                tail = digest.copy()
                tail.update(extra_bytes(extras_between(extras, 0, length)))
                ids.append(self.space + tail.digest())
            return ids
        for at in range(0, len(raw), TOKEN_BYTES):
            digest.update(raw[at : at + TOKEN_BYTES])
            ids.append(self.space + digest.digest())
        return ids
