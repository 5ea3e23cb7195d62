"""Names of blocks: the namespace of a store, and block ids of tokens in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvkeep.core.errors import InvalidValue, check_type, told
from kvkeep.core.extras import extra_bytes, extras_between
from kvkeep.core.keys import Namespace, chain_keys, root_key, space_of
from kvkeep.core.public import public_namespace
from kvkeep.core.tokens import TOKEN_BYTES
from kvkeep.store.identity import model_identity
from kvkeep.store.tiers import note_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.extras import Extras
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.public import PublicPrefixes
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.forms import Layout

__all__ = ["Names", "TenantNames", "store_namespace"]

_MOST_TENANTS: Final = 4096


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
    snapshots: bool = False,
) -> Namespace:
    """Return the namespace of a store: everything on which the bytes of its KV depend.

    ``model`` is a loaded module or a model directory, whose identity becomes the revision, or
    ``name@revision``, or a name with ``revision`` given. Of ``snapshots``, every group of layers
    counts.

    Raises:
        InvalidValue: the model has no revision, or there are several ranks and ``rank`` is empty.
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
    return Namespace(
        tenant=tenant,
        model=model,
        revision=revision,
        dtype=geometry.dtype,
        layout=f"{layout}/{block_tokens}",
        geometry=_groups_of(geometry) if snapshots else _shape_of(geometry),
        lora=lora,
        rank=rank,
    )


def _shape_of(geometry: KVGeometry) -> str:
    """Return the one shape of all layers of a plain geometry."""
    heads = f"{geometry.layers}x{geometry.rank_heads}x{geometry.head_dim}"
    if geometry.latent_dim is not None:
        heads += f"/latent{geometry.latent_dim}"
    elif geometry.value_dim != geometry.head_dim:
        heads += f"/v{geometry.value_dim}"
    return heads


def _groups_of(geometry: KVGeometry) -> str:
    """Return a digest of all groups of layers, with the number of layers in front."""
    tp, described = geometry.tp, []
    for group in geometry.groups:
        words: list[object] = [group.kind, group.span, group.grid, group.layers]
        if (shape := group.shape) is not None:
            words += [shape.rank_heads(tp), shape.head_dim, shape.value_dim, shape.latent_dim]
        words += [(one.name, one.rank_shape(tp), one.dtype) for one in group.state]
        described.append(repr(words))
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    return f"{geometry.layers}/groups-{digest[:40]}"


def _named(model: str | torch.nn.Module, revision: str) -> tuple[str, str]:
    """Return the name and the revision of the model."""
    check_type("revision", revision, str, "text")
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
            f"model is {told(model)}; it is a torch.nn.Module, 'name@revision', or a directory"
        )
    # Check for a directory first: its path may contain an "@" that precedes no revision.
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


@dataclass(frozen=True, slots=True)
class Names:
    """The block ids of the prompts of one namespace, or, `having` extras, of one prompt.

    Attributes:
        space: the first bytes of every block id, which stand for the namespace.
        root_key: the key before the first block.
        extras: extras of the prompt; positions count from its first token.
        public: the ids of the first blocks, if all tenants share them.
        passed: the keys that these blocks have in this namespace, where they are not stored.
    """

    space: bytes
    root_key: bytes
    block_tokens: int
    extras: Extras = ()
    public: tuple[bytes, ...] = ()
    passed: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, namespace: Namespace, block_tokens: int) -> Names:
        """Return the names of prompts without extras."""
        return cls(space_of(namespace), root_key(namespace), block_tokens)

    def having(self, extras: Extras) -> Names:
        """Return the names of a prompt with these extras."""
        return replace(self, extras=extras) if extras else self

    def behind(self, shared: Names, tokens: TokenArray) -> Names:
        """Return the names of a prompt that begins with the whole blocks ``tokens`` of ``shared``.

        The others have the same names as if no block was shared. So what is declared public
        decides which copy of the first blocks a prompt uses, and no name of a private block.
        """
        keys = chain_keys(self.root_key, tokens.tobytes(), self.block_tokens * TOKEN_BYTES)
        return replace(self, public=tuple(shared.full(tokens)), passed=tuple(keys))

    def private(self) -> Names:
        """Return the names of all blocks of the prompt in this namespace."""
        return replace(self, public=(), passed=()) if self.public else self

    def unshared(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Return ``blocks`` of this prompt, each public one under its name in this namespace."""
        if not self.public:
            return blocks
        names = {
            block: self.space + key for block, key in zip(self.public, self.passed, strict=True)
        }
        return [names.get(block, block) for block in blocks]

    @property
    def root(self) -> bytes:
        """The block id before the first block: `space` and `root_key`."""
        return self.space + self.root_key

    def full(self, tokens: TokenArray) -> list[bytes]:
        """Return the ids of a prompt's full blocks. Cost: about 1 µs a block of 256 tokens."""
        size = self.block_tokens * TOKEN_BYTES
        keys = chain_keys(self.root_key, tokens.tobytes(), size, self.extras)
        private = [self.space + key for key in keys]
        return [*self.public[: len(private)], *private[len(self.public) :]]

    def tails(
        self, blocks: list[bytes], tokens: TokenArray, *, start: int | None = None
    ) -> list[bytes]:
        """Return the ids of all tails behind ``blocks``: of ``tokens[:1]``, ``tokens[:2]``, …

        ``start`` is the position of ``tokens`` in the prompt. Without it, ``blocks`` must be all
        blocks before them; with it, the last one is enough. The key of a tail is hashed as that of
        a block is. Cost: about 1 µs a tail.
        """
        if start is None:
            start = len(blocks) * self.block_tokens
        parent = blocks[-1][len(self.space) :] if blocks else self.root_key
        if blocks and start <= len(self.passed) * self.block_tokens:
            parent = self.passed[start // self.block_tokens - 1]
        digest = hashlib.sha256(parent)
        raw = tokens.tobytes()
        extras = extras_between(self.extras, start, start + len(tokens)) if self.extras else ()
        ids = []
        for end in range(TOKEN_BYTES, len(raw) + 1, TOKEN_BYTES):
            digest.update(raw[end - TOKEN_BYTES : end])
            tail = digest
            if extras:
                tail = digest.copy()
                tail.update(extra_bytes(extras_between(extras, 0, end // TOKEN_BYTES)))
            ids.append(self.space + tail.digest())
        return ids


class TenantNames:
    """The `Names` of every tenant of a store, made when a tenant is first named.

    Attributes:
        notes: for each tenant's space, the note that tiers keep beside its blocks.
        made: called with each space that is named from then on, and its tenant; None for what all
            tenants share.

    Thread safety: all methods; two threads may make the same names, which are equal.
    """

    def __init__(self, namespace: Namespace, block_tokens: int, public: PublicPrefixes) -> None:
        self._namespace = namespace
        self._public = public
        self._shared: Names | None = None  # of what all tenants share
        self._block_tokens = block_tokens
        self._names: dict[str, Names] = {}
        self.notes: dict[bytes, bytes] = {}
        self.made: Callable[[bytes, str | None], object] = lambda _space, _tenant: None

    def of(self, tenant: str | None) -> Names:
        """Return the names of ``tenant``, by default the store's own.

        Raises:
            InvalidValue: ``tenant`` is no text.
        """
        if tenant is None:
            tenant = self._namespace.tenant
        check_type("tenant", tenant, str, "text")
        names = self._names.get(tenant)
        if names is None:
            if len(self._names) > _MOST_TENANTS:  # bounded: a server may take names from clients
                self._names.clear()
                self.notes.clear()
            names = self._names[tenant] = self._make(replace(self._namespace, tenant=tenant))
        return names

    def _make(self, namespace: Namespace) -> Names:
        names = Names.of(namespace, self._block_tokens)
        self.notes[names.space] = note_of(namespace)
        self.made(names.space, None if namespace.scope else namespace.tenant)
        return names

    def shared(self) -> Names:
        """Return the names of what all tenants share."""
        if self._shared is None:
            self._shared = self._make(public_namespace(self._namespace))
        return self._shared

    def of_prompt(self, tenant: str | None, tokens: TokenArray, extras: Extras) -> Names:
        """Return the names of one prompt of a tenant: its first blocks may be public."""
        names, public = self.of(tenant), self._public
        if not len(public):
            return names.having(extras)
        tenant = self._namespace.tenant if tenant is None else tenant
        namespace = replace(self._namespace, tenant=tenant)
        placed = public.place(tokens, namespace, self._block_tokens, extras)
        if not placed.tokens:
            return names.having(extras)
        return names.having(extras).behind(self.shared(), tokens[: placed.tokens])
