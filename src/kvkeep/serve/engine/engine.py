"""`Engine`: prompts in, completions out, many at a time, over a runner and a paged cache."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvkeep.core.cache.sessions import check_name
from kvkeep.core.cost import CostModel
from kvkeep.core.errors import IllegalStep, InvalidValue, QueueFull
from kvkeep.core.keys import Namespace, as_namespace
from kvkeep.core.tokens import as_tokens
from kvkeep.observe.usage import Notifier, RequestBegun
from kvkeep.serve.engine.offload.offload import Offload
from kvkeep.serve.engine.params import Limits, SamplingParams
from kvkeep.serve.engine.request import CacheUse, Request, RequestChecks
from kvkeep.serve.engine.scheduler import GroupPasses, PassPlanner, Scheduler
from kvkeep.serve.engine.stats import EngineStats
from kvkeep.serve.engine.step import EngineStep, PassTimer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as Row

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.observe.usage import RequestObserver, RequestOrigin
    from kvkeep.serve.engine.request import Completion, Delta
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.text import Tokenizer
    from kvkeep.store import KVStore, Removed

__all__ = ["Engine"]

_GREEDY = SamplingParams()
_LIMITS = Limits()
_CHECK_S = 1.0  # least time between two checks of the model in a busy engine


class Engine:
    """Generates with a `Runner` from the pages of a `PagedCache` of the same size.

    Requests join and leave the batch at every `step`, which is one forward pass over the newest
    tokens of decoding answers and chunks of prompts. A server calls `step` in a loop; `generate`
    and `stream` are such loops.

    ``tokenizer`` encodes text prompts and decodes tokens; without one, prompts are token ids and
    completions have no text. ``limits`` bound the batch and the queue. With a cache of
    ``reuse=False`` every prompt is computed in full. A ``store`` extends the cache: prompt tokens
    that the store has and the pool has not are loaded where `cost` says that this is faster than
    computing them. A load that turns slow ends, and the rest is computed; so does one of which
    nothing comes for ``load_timeout`` seconds. Computed KV is written to the store in the
    background. The store's creator closes it, after this engine's `close`.
    ``observers`` get the events of each request. ``cost`` learns what computing takes; with a
    store, the store's does.

    Cache and runner belong together (`PagedCache.bind`): another engine may use both after this
    one, but no cache is used with two runners. An engine whose runner was later given to another
    cache raises `IllegalStep`, since its pages are overwritten. A store is bound to the runner's
    model (`KVStore.bind`). `add` checks that the model was not changed (`Runner.check_model`); in
    a busy engine at most once a second.

    Thread safety: none; one thread calls it.

    Raises:
        InvalidValue: the cache has another size or is another runner's; the store is of another
            model or geometry.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PagedCache,
        tokenizer: Tokenizer | None = None,
        *,
        limits: Limits = _LIMITS,
        store: KVStore | None = None,
        load_timeout: float = 2.0,
        observers: Iterable[RequestObserver] = (),
        cost: CostModel | None = None,
    ) -> None:
        theirs, ours = (cache.num_pages, cache.page_size), (runner.num_pages, runner.page_size)
        if theirs != ours:
            raise InvalidValue(
                f"the cache has {theirs[0]} pages of {theirs[1]} tokens and the runner {ours[0]} "
                f"of {ours[1]}; give both the same"
            )
        if cache.groups != runner.layout:
            raise InvalidValue(
                f"the cache was made with {cache.groups or cache.page_size}, and this model needs "
                f"PagedCache({runner.num_pages}, {runner.layout or runner.page_size})"
            )
        cache.bind(runner.groups or runner.tensors)
        self.runner = runner
        self.cache = cache
        self.store = store
        self.tokenizer = tokenizer
        self.limits = limits
        self._checks = RequestChecks(runner, tokenizer, limits)
        self._model_checked = -_CHECK_S
        self._stats = EngineStats()
        self._notifier = Notifier(*observers)
        self.cost = (cost or CostModel()) if store is None else store.cost
        """What computing takes, and the store's tiers; learned from what happens."""
        self.cost.prefill.kv_bytes_per_token = float(runner.geometry.bytes_per_token)
        self._offload: Offload | None = None
        if store is not None:
            if not cache.reuse:
                raise InvalidValue(
                    "a store needs a cache that reuses: leave out store, or the cache's reuse=False"
                )
            self._offload = Offload(
                store, runner, cache, self._stats,
                timeout=load_timeout, step_tokens=limits.step_tokens, notifier=self._notifier,
            )  # fmt: skip
        passes = None if runner.layout is None else GroupPasses(runner.plan, runner.layout)
        self._scheduler = Scheduler(
            cache,
            limits,
            self._stats,
            self._offload,
            notifier=self._notifier,
            passes=passes,
        )
        self._step = EngineStep(
            runner,
            self._scheduler,
            PassPlanner(self._scheduler, limits, passes, offload=self._offload),
            self._stats,
            timer=PassTimer(self.cost.prefill, runner.device),
            offload=self._offload,
            notifier=self._notifier,
            passes=passes,
        )
        runner.serve(cache)

    # --- requests ----------------------------------------------------------------------------

    def add(
        self,
        prompt: str | TokensLike,
        params: SamplingParams = _GREEDY,
        *,
        namespace: NamespaceLike = "",
        store: bool = True,
        answers: bool = True,
        session: str | None = None,
        origin: RequestOrigin | None = None,
    ) -> Request:
        """Queue a request; later steps compute it.

        ``session`` names the conversation it belongs to (`PagedCache.session`).
        ``store=False`` reuses cached tokens and publishes none. ``answers=False`` writes the KV of
        the prompt to the engine's store and keeps that of generated tokens in the pool alone.

        Raises:
            QueueFull: ``max_waiting`` requests wait already.
            InvalidValue: the request can never run: an empty prompt, a token outside the
                vocabulary, a prompt longer than pool or model allow, more answers than run at
                once, or stop texts without a tokenizer.
            IllegalStep: the model was changed since the runner took it over, or the runner was
                given to another cache.
        """
        self._check_cache()
        self._check_model()
        space = as_namespace(namespace)
        tokens = self._checks.tokens(prompt)
        self._checks.params(params)
        session = None if session is None else check_name(session)
        waiting = self.num_waiting
        if self.limits.max_waiting is not None and waiting >= self.limits.max_waiting:
            raise QueueFull(f"{waiting} requests wait already; max_waiting allows no more")
        self._stats.requests += 1
        request = Request(
            self._stats.requests,
            tokens,
            params,
            CacheUse(namespace=space, store=store, answers=answers, session=session),
            tokenizer=self.tokenizer,
            origin=origin,
        )
        self._scheduler.enter(request)
        self._notifier.emit(RequestBegun(request.record))
        return request

    def abort(self, request: Request) -> None:
        """Drop a request and free its pages; pages that it published stay cached.

        The request produces no more deltas. Does nothing for a request that has ended.
        """
        if request.id in self._scheduler.requests:
            self._stats.aborted += 1
            ended = request.ended_now("aborted")
            self._scheduler.leave(request)
            self._notifier.emit(ended)

    def step(self) -> list[Delta]:
        """Run one forward pass and return its deltas; empty if there was nothing to compute.

        An error in the pass ends the requests that took part in it: their last delta has it. Other
        requests go on. Raises `IllegalStep` when the runner was given to another cache.
        """
        self._check_cache()
        return self._step.run()

    def close(self, timeout: float = 10.0) -> bool:
        """Abort all requests, and wait ``timeout`` seconds for the store to write computed KV.

        Returns whether the store has written all of it; True without a store. May be called twice;
        `add` and `step` may not be called afterwards.
        """
        try:
            for request in list(self._scheduler.requests.values()):
                self.abort(request)
        finally:
            offload, self._offload = self._offload, None
            flushed = offload is None or offload.close(timeout)
        return flushed

    def clear_store(self, namespace: NamespaceLike | None = None) -> Removed | None:
        """Delete the stored KV of ``namespace``; None: of all namespaces that this engine has seen.

        Returns None without a store. Safe from any thread.
        """
        space = None if namespace is None else as_namespace(namespace)
        offload = self._offload
        return None if offload is None else offload.clear(space)

    def remove_stored(self, tokens: TokensLike, namespace: NamespaceLike = "") -> Removed | None:
        """Delete the stored KV of a prompt, as `KVStore.remove` does; None without a store.

        Safe from any thread. Running requests store what they compute afterwards.
        """
        offload, space = self._offload, as_namespace(namespace)
        return None if offload is None else offload.remove(as_tokens(tokens), space)

    def store_tenant(self, namespace: NamespaceLike) -> str | None:
        """Return the store's tenant for ``namespace``; None without a store.

        Safe from any thread.
        """
        offload = self._offload
        return None if offload is None else offload.tenant_of(as_namespace(namespace))

    def observe(self, *observers: RequestObserver) -> None:
        """Replace the observers.

        The new ones may receive later events of requests that were added before.
        """
        self._notifier.observers = observers

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._scheduler.requests)

    @property
    def num_running(self) -> int:
        """Answers in the batch, which hold pages."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that wait for admission to the batch."""
        return len(self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        return replace(
            self._stats,
            running=self.num_running,
            waiting=self.num_waiting,
            observer_errors=self._notifier.errors,
        )

    # --- loops -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Row[str | TokensLike],
        params: SamplingParams | Row[SamplingParams] = _GREEDY,
        *,
        namespace: NamespaceLike = "",
    ) -> list[Completion]:
        """Return the completions of all ``prompts``, in their order.

        ``params`` are one for all, or one for each. Raises what `stream` raises.
        """
        done = {
            delta.request.id: delta.completion
            for delta in self.stream(prompts, params, namespace=namespace)
            if delta.completion is not None
        }
        return [done[number] for number in sorted(done)]

    def stream(
        self,
        prompts: Row[str | TokensLike],
        params: SamplingParams | Row[SamplingParams] = _GREEDY,
        *,
        namespace: NamespaceLike = "",
    ) -> Iterator[Delta]:
        """Generate for all ``prompts``, and yield tokens as they come.

        Request ids are in the order of the prompts. Everything is checked before the first step
        (see `add`). Later errors are raised: `OutOfPages` when sequences outside this engine leave
        no room for a request. Closing the iterator early, or an error, frees all pages. Requests
        added before are computed as well.
        """
        if isinstance(prompts, str):
            raise InvalidValue("prompts is a list of prompts; for one, write [prompt]")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidValue(f"{len(prompts)} prompts need as many params, got {len(each)}")
        space = as_namespace(namespace)
        arrays: list[TokenArray] = []
        for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                arrays.append(self._checks.tokens(prompt))
                self._checks.params(one)
            except InvalidValue as error:
                raise InvalidValue(f"prompt {number}: {error}") from error
        return self._run(arrays, each, space)

    def _run(
        self, prompts: list[TokenArray], params: list[SamplingParams], namespace: Namespace
    ) -> Iterator[Delta]:
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                requests.append(self.add(prompt, one, namespace=namespace))
            mine = {request.id for request in requests}
            while any(number in self._scheduler.requests for number in mine):
                for delta in self.step():
                    if delta.request.id not in mine:
                        continue
                    if delta.error is not None:
                        raise delta.error
                    yield delta
        finally:
            for request in requests:
                self.abort(request)

    # --- checks ------------------------------------------------------------------------------

    def _check_cache(self) -> None:
        if not self.runner.serves(self.cache):
            raise IllegalStep(
                "this engine's runner was given to an engine with another cache, which writes over "
                "the same pages; give each cache a runner of its own"
            )

    def _check_model(self) -> None:
        now = time.monotonic()
        if not self.has_work or now - self._model_checked >= _CHECK_S:
            self.runner.check_model()
            self._model_checked = now
