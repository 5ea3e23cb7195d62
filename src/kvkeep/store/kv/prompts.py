"""`PromptStore`: what stores of prompts answer and change, whatever they keep of a prompt."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import (
    IllegalStep,
    InvalidValue,
    check_type,
    number,
    switch,
    told,
    whole,
)
from kvkeep.core.extras import as_extras
from kvkeep.core.geometry import parse_bytes
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import as_tokens
from kvkeep.store.blocks.base import Store
from kvkeep.store.blocks.stats import StoreCounters, closed_is_illegal, seconds_of
from kvkeep.store.identity import is_loaded
from kvkeep.store.kv.names import PromptBlocks, TenantNames
from kvkeep.store.tiers import PROMPT_TOKENS, Chain, TenantWeights, TieredStore, open_tiers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.tokens import TokensLike
    from kvkeep.store.blocks.stats import Lookup, Put, StoreStats
    from kvkeep.store.blocks.timing import Timing
    from kvkeep.store.kv.kept import KeptPrompts, Prefetch
    from kvkeep.store.kv.names import Names
    from kvkeep.store.kv.options import StoreConfig
    from kvkeep.store.kv.snapshots import LoadedSnapshot
    from kvkeep.store.kv.transfers import LoadedKV
    from kvkeep.store.tiers import Miss, Removed

__all__ = ["PromptStore"]

_UNKNOWN = Ended()


class PromptStore(Store):
    """Prompts over several tiers, found by their tokens; `KVStore` puts and gets their KV.

    Thread safety: all methods.

    Attributes:
        geometry: of the model.
        namespace: everything on which the bytes of the KV depend.
        block_tokens: tokens of a block.
        public: the prefixes that all tenants share.
    """

    def __init__(self, config: StoreConfig, kept: KeptPrompts) -> None:
        """``kept`` knows which records a prompt has."""
        self.geometry = config.geometry
        self.layout = config.layout
        self.block_tokens = config.block_tokens
        self.namespace = config.namespace
        self._binding = ModelBinding(self.namespace.model, self.namespace.revision)
        self.public = PublicPrefixes()
        self._names = TenantNames(self.namespace, self.block_tokens, self.public)
        self._kept = kept
        limits = {
            self._names_of(name).space: parse_bytes(limit) for name, limit in config.quotas.items()
        }
        shares = _weights(self._names, config)
        front, below = open_tiers(
            config.tiers, kept.block_shape, shares=shares is not None,
            prompt_bytes=self.geometry.bytes_for(PROMPT_TOKENS),
        )  # fmt: skip
        tiered = TieredStore(
            front, below, config.policy, notes=self._names.notes, shares=shares, cost=config.cost
        )
        if shares is not None:
            self._names.made = partial(_announce, tiered)
        super().__init__(tiered, "tokens")
        self._reporter = KVReporter(self.geometry.bytes_per_token, self._timing)
        self._pin_memory()
        for space, limit in limits.items():
            self._tiered.set_quota(space, limit)
        self._tiered.expect(self._names_of().space)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, fastest first. The first one is in memory."""
        return self._tiered.names

    def bind(self, identity: str) -> None:
        """Reserve the store for the loaded model with this `kvkeep.store.model_identity`.

        Engines call it before their first `put` or `get`. A store whose revision is the identity
        of a loaded model accepts no other model. A store that was named otherwise is reserved for
        the first model it is bound to until it is closed; only its name tells which model computed
        the KV stored earlier.

        Raises:
            InvalidValue: the store is reserved for another model.
        """
        self._tiered.check_open()
        self._binding.bind(identity)

    def lookup(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> Lookup:
        """Return how many tokens are stored as a prefix, and in which tiers; read no KV.

        Of snapshots, the longest position at which all groups of layers agree.

        Blocks may be evicted, or prove damaged, before a later `get`. Shared tiers are queried
        about blocks that are not known here. ``extra`` as in `put`.
        """
        prompt = self._requested(self._prompt(tokens, 0, tenant, extra))
        return self._kept.lookup(self._tiered, prompt, self.tiers)

    def why(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        since: float | None = None,
        extra: ExtraLike | None = None,
    ) -> tuple[Miss, ...]:
        """Return why tokens of a prompt are missing: in order, without gaps, to its end.

        ``start`` is the length of the stored prefix, as `lookup` returned it; stored blocks from
        ``start`` on are passed over as well. Stored blocks behind a missing one cannot be used and
        share its fate. ``since`` (Unix seconds): a tier that failed or was late since then counts
        as unavailable even for blocks it holds; give it after a `get` that returned less than was
        found. ``extra`` as in `put`.

        Reads and queries nothing. Cost: a few µs a block behind ``start``.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
        """
        since = None if since is None else number("since, in Unix seconds,", since)
        return self._kept.why(self._tiered, self._prompt(tokens, start, tenant, extra), since)

    def ended(
        self,
        tokens: TokensLike,
        *,
        prompt: int,
        ended: Ended = _UNKNOWN,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> None:
        """Record that a request ended: of ``tokens``, those from ``prompt`` on are its answer.

        The store then recognises the conversation's next prompt, by its tokens alone. It learns
        when conversations return, for tiers with ``policy=returns``, and which tokens of answers
        the next prompt contains (`worth`). ``ended`` says more of the end, if that is known.
        ``extra`` as in `put`.

        Nothing of it is stored: a store that is opened anew begins to learn anew. Cost: about 1 µs
        a block and 20 µs; with ``policy=returns`` 3 µs more for each block that a tier holds.
        `kvkeep.store.tiers.conversations` has the bounds of memory.

        Raises:
            InvalidValue: tokens or ``prompt`` are wrong.
            IllegalStep: the store is closed.
        """
        self._tiered.check_open()
        row, _, names = given = self._prompt(tokens, 0, tenant, extra)
        prompt = whole("prompt", prompt, 0, len(row))
        check_type("ended", ended, Ended, "an Ended(…)")
        conversations, chain = self._tiered.conversations, _chain(given)
        beside: list[bytes] = []
        if conversations.waits is not None:
            # The next prompt may go on where the answer ended, or where it began.
            size = names.block_tokens
            with closed_is_illegal():
                for end in dict.fromkeys((len(row), prompt)):
                    full = list(chain.blocks[: end // size])
                    one = given._replace(row=row[:end])
                    beside += self._kept.beside(self._tiered, one, full)
        conversations.ended(chain, prompt, ended, names.space, beside)

    def worth(
        self,
        answer: int,
        *,
        ended: Ended | None = None,
        first: int | None = None,
        tenant: str | None = None,
    ) -> int:
        """Return how many leading tokens of an answer of ``answer`` tokens are worth storing.

        Chat templates leave reasoning out of later prompts, so most tokens of such answers are
        never read again. What share is, the store learns from `ended` and from the prompts that
        follow, by tenant, ``ended.stop``, length and ``first`` token of the answer, which tells
        answers with reasoning from others; until it has seen that answers are not read, all of an
        answer is worth storing. Without ``ended``, the answer may become
        longer, and what is returned holds however it will end.

        Raises:
            InvalidValue: ``answer`` is negative.
        """
        self._tiered.check_open()
        answer = whole("answer", answer, 0)
        first = None if first is None else whole("first", first)
        check_type("ended", ended, Ended | None, "an Ended(…)")
        conversations = self._tiered.conversations
        return conversations.worth(self._names_of(tenant).space, answer, ended, first)

    def unkept(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        answer: bool = False,
        unread: bool = False,
        extra: ExtraLike | None = None,
    ) -> None:
        """Record that the full blocks of ``tokens[start:]`` were never put, for `why`.

        The recorded reason is a full queue; with ``answer``, that generated tokens are not to be
        stored; with ``unread``, that answers like this one are never read again (`worth`), which
        also counts in `StoreStats.unread_tokens`. ``extra`` as in `put`.
        """
        self._tiered.check_open()
        row, start, names = self._prompt(tokens, start, tenant, extra)
        if switch("unread", unread):
            self._unread(names.full(row)[start // self.block_tokens :], len(row) - start)
            return
        blocks = names.full(row)[-(-start // self.block_tokens) :]
        if switch("answer", answer):
            self._tiered.losses.note(blocks, "", "refused", "answer")
        else:
            self._tiered.losses.note(blocks, self._tiered.memory.name, "dropped", "queue full")

    def _unread(self, blocks: Sequence[bytes], tokens: int) -> None:
        self._reporter.counters.count(unread_tokens=tokens)
        self._tiered.losses.note(blocks, "", "refused", "unread")

    def touch(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> None:
        """Count a use of the stored blocks of ``tokens``, whose KV was found elsewhere.

        Engines call it on hits in their own memory; otherwise the most used prefixes would be the
        first to be evicted here. `get` and `put` count as uses themselves. Transfers nothing.
        ``extra`` as in `put`.
        """
        with closed_is_illegal():
            prompt = self._requested(self._prompt(tokens, 0, tenant, extra))
            self._kept.touch(self._tiered, prompt)

    def prefetch(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Prefetch:
        """Start to read the KV of ``tokens[start:]`` into memory, for a later `get`.

        Returns at once. Reads at most as much as half of the memory tier holds. ``extra`` as in
        `put`.
        """
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        return self._kept.prefetch(self._tiered, prompt.copied())

    def pin(
        self,
        tokens: TokensLike,
        seconds: float,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """Protect the stored prefix of ``tokens`` from eviction; return the tokens pinned.

        The pin ends after ``seconds``. It holds in every tier that has the blocks, for at most half
        of each tier. Of snapshots, all that resuming there needs is pinned, or nothing. ``extra``
        as in `put`.
        """
        seconds = seconds_of("seconds", seconds, ends=True)
        return self._kept.pin(self._tiered, self._prompt(tokens, 0, tenant, extra), seconds)

    def unpin(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """End the pin of a prompt from ``start`` on; return the tokens that were pinned there.

        Blocks with a token before ``start`` stay pinned; of snapshots, those that end before it.
        ``extra`` as in `put`.
        """
        return self._kept.unpin(self._tiered, self._prompt(tokens, start, tenant, extra))

    def remove(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Removed:
        """Delete the stored blocks of ``tokens[start:]`` from every tier, pinned or not.

        This deletes all blocks with a token from ``start`` on, so ``tokens[:start]`` remains up to
        its last whole block; all tails there, also of shorter prompts; and known blocks of longer
        prompts behind them. The store remembers some 32,000 links between blocks that it put or
        read; other blocks behind remain until they are evicted, and are found only if the same
        prompt is put again. Reads and writes in progress do not bring a block back.

        `Removed.complete` says whether all tiers deleted their blocks; `Removed.failed` names the
        others. Memory of other processes, and their pending writes to shared tiers, are not
        reached. A concurrent `put` of the prompt comes before or after, as a whole or in part.
        The blocks of a public prefix stay; copies that the tenant stored before it was declared, or
        while it was not, are deleted. ``extra`` as in `put`.

        Cost: about 1 µs a token, and one delete of as many names in each shared tier.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
            IllegalStep: the store is closed.
        """
        prompt = self._prompt(tokens, start, tenant, extra)
        with closed_is_illegal():
            self._tiered.conversations.forget(_chain(prompt), start)
            # Public blocks are not this tenant's to delete; its own copies of them are.
            private = prompt._replace(names=prompt.names.private())
            return self._kept.remove(self._tiered, private)

    def clear(self, *, tenant: str | None = None) -> Removed:
        """Delete all blocks of a tenant in this store's namespace; see `Removed` for failures.

        They are found no more from now on, what is put afterwards is. A tier that fails to list or
        delete, or makes no progress for its timeout, is named in `Removed.failed`: it serves none
        of the old blocks until this store is closed, but other processes find them there, and this
        one after a restart, unless it is cleared again.

        Cost: that of listing every tier, which they do in parallel.
        """
        space = self._names_of(tenant).space
        with closed_is_illegal():
            self._tiered.conversations.clear(space)
            return self._tiered.clear(space)

    def stats(self) -> StoreStats:
        """Return the counts since the store was opened, and the state of every tier."""
        return self._reporter.counters.stats(tuple(self._tiered.stats()))

    def _requested(self, prompt: PromptBlocks) -> PromptBlocks:
        """Report a prompt to what follows conversations, if ends of requests are reported."""
        self._tiered.check_open()
        if len(self._tiered.conversations):
            self._tiered.conversations.requested(_chain(prompt))
        return prompt

    def _names_of(self, tenant: str | None = None) -> Names:
        return self._names.of(tenant)

    def _prompt(
        self, tokens: TokensLike, start: int, tenant: str | None, extra: ExtraLike | None
    ) -> PromptBlocks:
        """Check the arguments that name a prompt."""
        row = as_tokens(tokens)
        start = whole("start", start, 0, len(row))
        extras = () if extra is None else as_extras(extra, len(row))
        return PromptBlocks(row, start, self._names.of_prompt(tenant, row, extras))


def _announce(tiered: TieredStore, space: bytes, tenant: str | None) -> None:
    """Announce a tenant; a closed store still names blocks (`PromptStore.root`)."""
    with suppress(IllegalStep):
        tiered.announce(space, tenant)


def _weights(names: TenantNames, config: StoreConfig) -> TenantWeights | None:
    """Return the weights of tenants, with the spaces of those that are named."""
    if config.shares is None:
        return None
    spaces: dict[bytes, str | None] = {names.shared().space: None}
    for tenant in {**config.quotas, **config.shares, config.namespace.tenant: 0}:
        spaces[names.of(tenant).space] = tenant
    return TenantWeights(config.shares, spaces)


def _chain(prompt: PromptBlocks) -> Chain:
    row, _, names = prompt
    size, public = names.block_tokens, len(names.public)
    return Chain(names.root, names.full(row), size, len(row), row, public)


class ModelBinding:
    """The identity of the only model whose KV a store accepts, once that is known.

    Thread safety: all methods. Users of a shared store have one binding.
    """

    def __init__(self, name: str, revision: str) -> None:
        self._name = name
        self._identity = revision if is_loaded(revision) else None
        self._lock = threading.Lock()

    def bind(self, identity: str) -> None:
        """See `KVStore.bind`."""
        if not is_loaded(identity):
            raise InvalidValue(
                f"the identity is {told(identity)}; the kvkeep.store.model_identity of a loaded "
                "model is needed"
            )
        with self._lock:
            bound = self._identity = self._identity or identity
        if bound != identity:
            raise InvalidValue(
                f"the store {self._name!r} holds KV of the model {bound}, and this model is "
                f"{identity}: its weights, configuration or adapters differ; open a store for it "
                "with KVStore(geometry, model=…)"
            )


class KVReporter:
    """Counts the tokens of a store's puts and gets, and reports each operation.

    ``began`` is what `Timing.begin` returned. Thread safety: all methods.
    """

    def __init__(self, token_bytes: int, timing: Timing) -> None:
        self._token_bytes = token_bytes
        self._timing = timing
        self.counters = StoreCounters()

    def put(self, began: float, given: int, put: Put, tier: str) -> None:
        """Report a put of ``given`` tokens; ``tier`` is the first one."""
        self.counters.count(
            puts=1, put_tokens=put.tokens, skipped_tokens=put.skipped, dropped_tokens=put.dropped
        )
        if began:
            tiers = [(tier, put.tokens)] if put.tokens else []
            size = put.tokens * self._token_bytes
            self._timing.end(began, "put", asked=given, moved=put.tokens, size=size, tiers=tiers)

    def get(self, began: float, requested: int, loaded: LoadedKV | LoadedSnapshot) -> None:
        """Report a get of ``requested`` tokens."""
        tokens = loaded.tokens
        self.counters.count(gets=1, asked_tokens=requested, hit_tokens=tokens)
        if began:
            size = tokens * self._token_bytes
            self._timing.end(
                began, "get", asked=requested, moved=tokens, size=size, tiers=loaded.tiers
            )
