"""`KVKeepTree`: kvkeep's prefix tree in place of SGLang's."""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.managers.schedule_batch import (
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder

from kvkeep.core.errors import IllegalStep
from kvkeep.core.eviction import ReturnAware
from kvkeep.core.returns import Ended, stop_after
from kvkeep.integrations.sglang.slot_tree import (
    GivenPages,
    PathHandle,
    SlotIndex,
    SlotTree,
    namespace_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.eviction.returns import RunningPrompt
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix.node import Node, Root

__all__ = ["FinishedAnswers", "KVKeepTree"]


_LOG = logging.getLogger("kvkeep.sglang")
_MOST_PRINTED = 1000


class _Top:
    """A node above the roots of all namespaces, as SGLang walks a tree."""

    def __init__(self, children: dict[Namespace, Root]) -> None:
        self.children = children


class KVKeepTree(BasePrefixCache):  # type: ignore[misc]  # Any where SGLang is not installed
    """A prefix cache of SGLang's scheduler: whole pages, and eviction of exactly what is asked for.

    SGLang allocates slots and writes KV; this tree keeps which slots have the KV of which tokens.
    Every method has the meaning that `BasePrefixCache` gives it. A match changes nothing, and a
    request counts as a use of its prefix once, when its first tokens are computed.

    All decisions depend on the order of calls alone, never on a clock, so the ranks of a server,
    which run the same requests, decide the same. The policy `returns` reads a clock, so it is for
    a single rank.

    Args:
        params: what SGLang constructs its caches from.
        make_policy: returns a new eviction policy.
        clock: gives seconds, for `returns`.

    Attributes:
        checkpoints_refused: how often nothing was stored because a request's tokens had changed
            behind its lock; each is logged.

    Thread safety: none, like SGLang's own; its scheduler is one thread. Cost: `SlotTree`.
    """

    disable = False

    def __init__(
        self,
        params: CacheInitParams,
        make_policy: Callable[[], EvictionPolicy],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.is_eagle: bool = params.is_eagle
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self._make_policy, self._clock = make_policy, clock
        self._capacity: int = self.token_to_kv_pool_allocator.size // self.page_size
        self.checkpoints_refused = 0
        self._begin()
        self._placements = Placements(params)
        self.kv_events = self._placements.recorder
        self.kv_events.record_all_cleared()
        if params.enable_metrics:
            self.init_metrics_collector()

    def _begin(self) -> None:
        """Start with an empty tree."""
        policy = self._make_policy()
        index = SlotIndex(self.page_size, policy, bigrams=self.is_eagle, clock=self._clock)
        self._tree = SlotTree(index, self.device, torch.int64, self._capacity)
        self._returns = TreeReturns(index, policy) if isinstance(policy, ReturnAware) else None
        self.root_node = _Top(index.roots)

    def reset(self) -> None:
        """Forget everything, also what is locked; SGLang clears its memory itself."""
        self._begin()
        self.kv_events.record_all_cleared()

    # --- matching --------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest stored prefix in whole pages; change nothing."""
        handle = self._match(params.key)
        return MatchResult(
            device_prefix_len=handle.pages * self.page_size,
            last_device_node=handle,
            last_host_node=handle,
            best_match_node=handle,
        )

    def touch_prefix(self, key: RadixKey) -> None:
        """Record a use of the stored prefix of ``key``, without a request."""
        node = self._match(key).node
        if node is None or not node.end:
            return
        self._tree.index.touch(node)

    def path_device_indices(self, node: PathHandle) -> torch.Tensor:
        """Return the slots of a prefix, int64 [tokens], on the device.

        Raises:
            IllegalStep: the prefix was evicted.
        """
        return self._tree.slots_of(node)

    def _match(self, key: RadixKey) -> PathHandle:
        key, _ = key.maybe_to_bigram_view(self.is_eagle)
        namespace = namespace_of(key.extra_key, key.cache_salt)
        return self._tree.match(key.token_ids, len(key) // self.page_size, namespace)

    # --- locks -----------------------------------------------------------------------------------

    def inc_lock_ref(self, node: PathHandle) -> IncLockRefResult:
        """Protect a prefix from eviction; locks are counted.

        Raises:
            IllegalStep: it was evicted before this first lock.
        """
        return IncLockRefResult(delta=-self._tree.lock(node) * self.page_size)

    def dec_lock_ref(
        self, node: PathHandle, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """End one lock; do nothing for a lock from before `reset`.

        Raises:
            IllegalStep: it is not locked.
        """
        if node.tree is not self._tree:
            return DecLockRefResult(delta=0)
        return DecLockRefResult(delta=self._tree.unlock(node) * self.page_size)

    # --- storing ---------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Store the whole pages of a key whose KV is in the slots ``params.value``.

        A stored prefix keeps its old slots; the caller frees those it gave for it.
        """
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        namespace = namespace_of(key.extra_key, key.cache_salt)
        pages = len(key) // self.page_size
        slots = params.value[: pages * self.page_size]
        index = self._tree.index
        hold, _ = index.hold(None, namespace, used=False)
        stored = self._tree.store(
            hold, GivenPages(key.token_ids, 0, pages, slots, params.priority or 0)
        )
        self._placements.stored(
            stored.symbols, stored.new, stored.parent, Space(key.extra_key, key.cache_salt)
        )
        index.release(stored.hold)
        return InsertResult(
            prefix_len=len(stored.existing) * self.page_size,
            total_len=pages * self.page_size,
            last_device_node=PathHandle(self._tree, namespace, key.token_ids, pages, stored.hold),
        )

    def checkpoint(self, req: Req, *, up_to: int) -> None:
        """Store what a request has computed, and move its lock to the end of it.

        Pages that another request stored meanwhile replace its own, which are freed. Cost: flat in
        the tokens that the request's lock covers already.
        """
        size, tree = self.page_size, self._tree
        tokens = req.full_untruncated_fill_ids
        space = Space(req.extra_key, req.cache_salt)
        namespace = namespace_of(*space)
        old = self._own(req, namespace)
        if old is not None and not tree.ends_with(old, tokens):
            # One page is compared, in case that something changed the tokens behind the lock. What
            # the request computed stays its own then, and is freed with it.
            self.checkpoints_refused += 1
            _LOG.warning("request %s has other tokens than it locked; nothing is stored", req.rid)
            return
        start = 0 if old is None else old.pages
        stop = max(start, tree.index.pages_of(min(up_to, len(tokens))))
        if old is None or not old.counted:
            self._count(req, old, namespace)
        if old is None:
            hold, _ = tree.index.hold(None, namespace, used=False)
        else:
            hold = tree.detach(old)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots = row[start * size : stop * size]
        stored = tree.store(hold, GivenPages(tokens, start, stop, slots, req.priority or 0))
        self._placements.stored(stored.symbols, stored.new, stored.parent, space)
        self._adopt(req, row, start * size, stored.existing)
        if old is None:
            self.unlock(req.lock)
        handle = PathHandle(tree, namespace, tokens, stop)
        handle.counted = True
        tree.attach(handle, stored.hold)
        req.kv.cache_protected_len = stop * size
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, stop * size)
        req.last_node = handle
        req.lock = TreeLock(handle, DecLockRefParams())
        if req.finished() and self._returns is not None:
            self._returns.closed(req, stored.hold, min(up_to, len(tokens)))

    def _own(self, req: Req, namespace: Namespace) -> PathHandle | None:
        """Return the handle that a request has locked in this tree and namespace."""
        handle: PathHandle | None = None if req.lock is None else req.lock.node
        if handle is None or handle.tree is not self._tree or handle.namespace != namespace:
            return None
        kept: int = req.kv.cache_protected_len
        return handle if handle.hold is not None and handle.pages * self.page_size <= kept else None

    def _count(self, req: Req, old: PathHandle | None, namespace: Namespace) -> None:
        """Count a request that was not counted yet."""
        if self._returns is not None:
            self._returns.opened(req, namespace, None if old is None else old.hold)
        if old is not None and old.hold is not None and old.pages:
            self._tree.index.hit(old.hold)

    def _adopt(self, req: Req, row: torch.Tensor, start: int, existing: PageArray) -> None:
        """Let a request use the pages stored from position ``start`` on, and free its own."""
        end = start + len(existing) * self.page_size
        own: int = req.kv.cache_protected_len
        if own >= end:
            return
        self.token_to_kv_pool_allocator.free_segment(row[own:end], start_pos=own)
        slots = self._tree.slots.of(existing)[own - start :]
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(own, end)), slots.to(row.dtype))

    # --- evicting --------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict ``params.num_tokens``, rounded up to pages, or all that can be if that is less."""
        began = time.perf_counter()
        gone, slots = self._tree.evict(-(-params.num_tokens // self.page_size))
        if not len(gone):
            return EvictResult()
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        self._placements.removed(gone)
        evicted = len(gone) * self.page_size
        self.update_eviction_metrics(evicted, began)
        return EvictResult(num_tokens_evicted=evicted)

    def evictable_size(self) -> int:
        """Return the stored tokens that could be evicted now."""
        return self._tree.index.num_evictable * self.page_size

    def full_evictable_size(self) -> int:
        """Return `evictable_size`: all layers keep every token."""
        return self.evictable_size()

    def protected_size(self) -> int:
        """Return the stored tokens that are locked."""
        return self.total_size() - self.evictable_size()

    def full_protected_size(self) -> int:
        """Return `protected_size`: all layers keep every token."""
        return self.protected_size()

    def total_size(self) -> int:
        """Return the stored tokens."""
        return self._tree.index.num_pages * self.page_size

    # --- inspecting ------------------------------------------------------------------------------

    @property
    def policy(self) -> EvictionPolicy:
        """The eviction policy; another object after each `reset`."""
        return self._tree.index.policy

    def root_node_handle(self, extra_key: str | None = None) -> PathHandle:
        """Return a handle of the empty prefix."""
        return PathHandle(self._tree, namespace_of(extra_key, None), ())

    def resolve_node_handle(self, node_handle: PathHandle) -> Node | _Top:
        """Return the node in which a prefix ends, for `dfs_weight_order`."""
        try:
            node = self._tree.end(node_handle)
        except IllegalStep:  # evicted since it was matched: it has no place in the order
            return self.root_node
        roots = self._tree.index.roots
        return roots.get(node_handle.namespace, self.root_node) if node is None else node

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of all stored tokens. Cost: everything stored."""
        return self._tree.slots.of(self._tree.pages())

    def pretty_print(self) -> None:
        """Print one line a run, at most 1,000. SGLang calls it when it is out of memory."""
        for shown, (node, depth) in enumerate(self._tree.nodes()):
            if shown < _MOST_PRINTED:
                said = self._tree.index.describe(node) if node.end else repr(node.before()[0])
                print("  " * depth, node, said)  # noqa: T201 - as SGLang's own trees do
        print(f"#tokens: {self.total_size()}")  # noqa: T201

    def check_integrity(self) -> None:
        """Recount everything that is stored; an ``AssertionError`` is a bug of kvkeep."""
        self._tree.check()


_DIGEST = 32
_WIDE = b"\xff"  # before the tokens of a page that has one beyond 32 bits


class Space(NamedTuple):
    """The namespace of a request in SGLang's words."""

    extra_key: str | None
    cache_salt: str | None


class Placements:
    """Records ``BlockStored`` and ``BlockRemoved`` for `KVKeepTree`, as SGLang's trees do.

    Hashes are SHA-256 chained over the tokens of pages, as SGLang computes them; they are kept by
    page number, so a removal hashes nothing. Without KV events in the server's settings every call
    does nothing.

    Thread safety: none. Cost: about 0.6 µs a stored page of 16 tokens. Memory: 40 bytes a page.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.recorder = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._page_size: int = params.page_size
        self._pairs: bool = params.is_eagle
        self._digests = np.empty((0, _DIGEST), np.uint8)
        self._published = np.empty(0, np.int64)

    def stored(self, symbols: bytes, pages: PageArray, parent: int, space: Space) -> None:
        """Record pages that were stored behind page ``parent``, -1 for none."""
        recorder = self.recorder
        if not recorder.enabled or not len(pages):
            return
        self._reserve(int(pages.max()))
        names = recorder.lora_names
        seed = self._seed(space)
        digests = self._chain(
            symbols, self._digests[parent].tobytes() if parent >= 0 else None, space
        )
        hashes = np.frombuffer(digests, ">i8").reshape(-1, _DIGEST // 8)[:, 0].tolist()
        if seed is not None:
            hashes = [namespaced_block_hash(one, namespace_seed=seed) for one in hashes]
        self._digests[pages] = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST)
        self._published[pages] = hashes
        recorder.enqueue(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=int(self._published[parent]) if parent >= 0 else None,
                token_ids=self._tokens(symbols),
                block_size=self._page_size,
                lora_id=None,
                medium=StorageMedium.GPU,
                cache_salt=space.cache_salt,
                lora_name=(
                    names.resolve(space.extra_key)
                    if recorder.dynamo_format
                    else names.get(space.extra_key)
                ),
            )
        )

    def removed(self, pages: PageArray) -> None:
        """Record pages that were evicted."""
        if self.recorder.enabled and len(pages):
            hashes = self._published[pages].tolist()
            self.recorder.enqueue(BlockRemoved(block_hashes=hashes, medium=StorageMedium.GPU))

    def _seed(self, space: Space) -> bytes | None:
        extra, salt = space
        if not self.recorder.dynamo_format:
            named = self.recorder.lora_names.get(extra) is not None
            extra, salt = (extra if named else None), None
        seed: bytes | None = kv_event_namespace_seed(extra_key=extra, cache_salt=salt)
        return seed

    def _chain(self, symbols: bytes, parent: bytes | None, space: Space) -> bytes:
        """Return the digests of pages, 32 bytes each, one after the other."""
        if parent is None and space.cache_salt is not None:
            parent = hashlib.sha256(b"sglang-cache-salt-v1\0" + space.cache_salt.encode()).digest()
        words = self._rows(symbols)
        if self._pairs:
            words = np.stack((words[:, :-1], words[:, 1:]), axis=2).reshape(len(words), -1)
        wide = np.any(words >> 32, axis=1).tolist()
        narrow = words.astype("<u4").tobytes()
        size = words.shape[1] * 4
        sha256 = hashlib.sha256
        above = parent or b""
        digests: list[bytes] = []
        for at in range(len(words)):
            if wide[at]:
                page = _WIDE + words[at].astype("<u8").tobytes()
            else:
                page = narrow[at * size : at * size + size]
            above = sha256(above + page).digest()
            digests.append(above)
        return b"".join(digests)

    def _tokens(self, symbols: bytes) -> list[int] | list[tuple[int, int]]:
        rows = self._rows(symbols)
        if not self._pairs:
            tokens: list[int] = rows.reshape(-1).tolist()
            return tokens
        firsts, seconds = rows[:, :-1].reshape(-1).tolist(), rows[:, 1:].reshape(-1).tolist()
        return list(zip(firsts, seconds, strict=True))

    def _rows(self, symbols: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens of pages, a page a row; of pairs, one token more."""
        return np.frombuffer(symbols, np.int64).reshape(-1, self._page_size + self._pairs)

    def _reserve(self, page: int) -> None:
        if page >= len(self._published):
            more = max(page + 1, 2 * len(self._published))
            digests, published = self._digests, self._published
            self._digests = np.empty((more, _DIGEST), np.uint8)
            self._published = np.empty(more, np.int64)
            self._digests[: len(digests)] = digests
            self._published[: len(published)] = published


class FinishedAnswers:
    """Tells how requests ended, as the classes of `kvkeep.core.returns` need it.

    An answer that ended with a token says with which one, and which mark came before
    (`stop_after`): "stop 151645 after 151658" is a tool call of some models, "stop 151645" is not.
    An aborted request is "unfinished".

    Thread safety: the scheduler's thread. Cost: `stop_after`'s.
    """

    def __init__(self) -> None:
        self._tokenizer: object = None
        self._named: frozenset[int] = frozenset()

    def of(self, req: Req) -> Ended:
        """Return how a finished request ended, and the length of its answer."""
        reason, answer = req.finished_reason, req.output_ids_through_stop
        stop = "unfinished"
        if isinstance(reason, FINISH_MATCHED_TOKEN) and len(answer):
            stop = stop_after(answer, self._names(req.tokenizer))
        elif isinstance(reason, FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX):
            stop = "stop text"
        elif isinstance(reason, FINISH_LENGTH):
            stop = "length"
        return Ended(stop, len(answer))

    def _names(self, tokenizer: Any) -> frozenset[int]:
        """Return the tokens that were added to the vocabulary by name, as far as it tells."""
        if tokenizer is not self._tokenizer:
            self._tokenizer = tokenizer
            try:
                self._named = frozenset(map(int, tokenizer.get_added_vocab().values()))
            except (AttributeError, NotImplementedError) as error:
                _LOG.warning("the tokenizer does not tell its added tokens: %.300s", str(error))
                self._named = frozenset()
        return self._named


class TreeReturns:
    """Tells the policy `returns` when requests begin and end.

    A prompt that extends that of an earlier request is the return of that conversation. A request
    that was retracted goes on when it runs again: it began once, and ends once.

    Thread safety: none. Memory: a record for each request that SGLang knows, besides `Waits`. Cost:
    about 10 µs a request.
    """

    def __init__(self, index: SlotIndex, policy: ReturnAware) -> None:
        self._index = index
        self._ends = FinishedAnswers()
        self._waits = policy.waits
        self._running: WeakKeyDictionary[Req, RunningPrompt] = WeakKeyDictionary()

    def opened(self, req: Req, namespace: Namespace, hold: Node | None) -> None:
        """Record that the first tokens of a request are computed; ``hold`` is of its prefix."""
        if req in self._running:
            return
        index, tokens = self._index, req.full_untruncated_fill_ids
        node = index.root(namespace) if hold is None else hold
        page = node.end

        def following() -> bytes:
            whole = page < index.pages_of(len(tokens))
            return index.symbols(tokens, page, page + 1) if whole else b""

        self._running[req] = self._waits.opened(
            node, len(req.origin_input_ids), namespace, following
        )

    def closed(self, req: Req, hold: Node, tokens: int) -> None:
        """Record the end of a request, of which ``tokens`` are stored up to ``hold``."""
        running = self._running.pop(req, None)
        if running is None or hold.parent is None:
            return
        answer = max(0, tokens - running.tokens)
        first = int(req.output_ids[0]) if len(req.output_ids) else None
        self._waits.closed(hold, running, answer, self._ends.of(req), first)
