"""`Engine`: prompts in, completions out, over a runner and a paged cache, many at a time.

Requests join and leave at every step. A step is one forward pass over what the `Scheduler` chose:
the newest tokens of all answers that decode, and chunks of prompts. `Engine.step` is the whole
story; a server calls it in a loop, `generate` and `stream` are such loops.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvkeep.core.cache.sessions import check_session
from kvkeep.core.errors import IllegalStep, InvalidValue, QueueFull
from kvkeep.core.keys import Namespace, as_namespace
from kvkeep.core.tokens import as_tokens
from kvkeep.observe.usage import Notifier, RequestBegun
from kvkeep.serve.engine.beams import BeamSearch
from kvkeep.serve.engine.offload.keeper import Keeper
from kvkeep.serve.engine.params import SamplingParams
from kvkeep.serve.engine.request import Request
from kvkeep.serve.engine.scheduler import Limits, Scheduler
from kvkeep.serve.engine.stats import EngineStats
from kvkeep.serve.engine.step import EngineStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
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
_CHECK_S = 1.0  # between two looks at whether the model changed, while there is work


class Engine:
    """Generates with a `Runner` from the pages of a `PagedCache` of the same measures.

    ``tokenizer`` turns text prompts into tokens and tokens into text; without one, prompts are
    token ids and completions have no text. ``limits`` bound what is taken on at once.
    Over a cache with ``reuse=False`` every prompt is computed in full. What a ``store`` has of a
    prompt, beyond what the cache has, is loaded while the request waits, for ``load_timeout``
    seconds at most; what is computed is written to it behind the steps. Whoever made the store
    closes it, after this engine's `close`. ``observers`` get the events of each request.

    Cache and runner belong together (`PagedCache.bind`): another engine may use both after this
    one, and no cache is used with two runners. An engine whose runner was given to another cache
    later raises `IllegalStep`, since its pages are written over. A store is bound to the runner's
    model (`KVStore.bind`). A model that is changed while it is served is noticed when the next
    request is added (`Runner.check_model`); in a busy engine the model is looked at once a second.

    Thread safety: none; one thread calls it.

    Raises:
        InvalidValue: the cache has other measures or is another runner's; the store is of another
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
    ) -> None:
        theirs, ours = (cache.num_pages, cache.page_size), (runner.num_pages, runner.page_size)
        if theirs != ours:
            raise InvalidValue(
                f"the cache has {theirs[0]} pages of {theirs[1]} tokens and the runner {ours[0]} "
                f"of {ours[1]}; give both the same"
            )
        cache.bind(runner.tensors)
        self.runner = runner
        self.cache = cache
        self.store = store
        self.tokenizer = tokenizer
        self.limits = limits
        self._checked_at = -_CHECK_S
        self._did = EngineStats()
        self._notifier = Notifier(*observers)
        self._keeper: Keeper | None = None
        if store is not None:
            if not cache.reuse:
                raise InvalidValue(
                    "a store is there to reuse; leave out store, or reuse=False of the cache"
                )
            self._keeper = Keeper(
                store, runner, cache, self._did, timeout=load_timeout, notifier=self._notifier
            )
        self._scheduler = Scheduler(cache, limits, self._did, self._keeper, self._notifier)
        self._step = EngineStep(runner, self._scheduler, self._did, self._keeper, self._notifier)
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
        turn: int | None = None,
        origin: RequestOrigin | None = None,
    ) -> Request:
        """Take on a request: it is computed by the steps to come.

        ``session`` and ``turn`` say what conversation it is part of (`PagedCache.session`).
        ``store=False`` reuses what there is of the prompt and leaves nothing behind;
        ``answers=False`` writes the KV of the prompt to the engine's store, and not that of
        generated tokens: they are in the pool alone, until they are evicted. Raises
        `QueueFull`, and `InvalidValue` for what can never be done: a prompt that is empty, has
        tokens the model does not know, or is longer than the pool or the model allows; more
        answers than run at once; stop texts without a tokenizer. Raises `IllegalStep` when the
        model was changed since the runner took it over, or the runner was given to another cache.
        """
        self._check_cache()
        self._check_model()
        space = as_namespace(namespace)
        tokens = self._checked(prompt)
        self._check(params)
        session, turn = check_session(session, turn)
        waiting = self._scheduler.waiting
        if self.limits.max_waiting is not None and len(waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(waiting)} requests wait already, which is as many as may")
        search = self._search(params, len(tokens)) if params.beams else None
        self._did.requests += 1
        request = Request(
            self._did.requests,
            tokens,
            params,
            namespace=space,
            store=store,
            answers=answers,
            tokenizer=self.tokenizer,
            search=search,
            session=session,
            turn=turn,
            origin=origin,
        )
        self._scheduler.enter(request)
        self._notifier.emit(RequestBegun(request.record))
        return request

    def abort(self, request: Request) -> None:
        """Drop a request: its pages go back now, what it published stays cached.

        Nothing more comes of it. One that has ended already is left as it is.
        """
        if request.id in self._scheduler.requests:
            self._did.aborted += 1
            ended = request.ended_now("aborted")
            self._scheduler.leave(request)
            self._notifier.emit(ended)

    def step(self) -> list[Delta]:
        """One forward pass; returns what came of it, nothing when there was nothing to do.

        What goes wrong in the pass ends the requests that were part of it, with the error in their
        last delta; all others go on. Raises `IllegalStep` when the runner was given to another
        cache.
        """
        self._check_cache()
        return self._step.run()

    def close(self, timeout: float = 10.0) -> bool:
        """Wait until the store has and keeps what was computed, ``timeout`` seconds at most.

        Drops the requests that are left. Returns whether the store has it all; without a store
        there is nothing to wait for. Closing twice is fine; `add` and `step` are over.
        """
        try:
            for request in list(self._scheduler.requests.values()):
                self.abort(request)
        finally:
            keeper, self._keeper = self._keeper, None
            flushed = keeper is None or keeper.close(timeout)
        return flushed

    def clear_store(self, namespace: NamespaceLike | None = None) -> Removed | None:
        """Delete what the store has of one namespace, or of all seen here; None without a store.

        Safe from any thread.
        """
        space = None if namespace is None else as_namespace(namespace)
        keeper = self._keeper
        return None if keeper is None else keeper.clear(space)

    def remove_stored(self, tokens: TokensLike, namespace: NamespaceLike = "") -> Removed | None:
        """Delete what the store has of a prompt, as `KVStore.remove` does; None without a store.

        Safe from any thread. What running requests go on to compute of it is stored again.
        """
        keeper = self._keeper
        return None if keeper is None else keeper.remove(as_tokens(tokens), as_namespace(namespace))

    def store_tenant(self, namespace: NamespaceLike) -> str | None:
        """As which tenant the store keeps what is of ``namespace``; None without a store.

        Safe from any thread.
        """
        keeper = self._keeper
        return None if keeper is None else keeper.tenant_of(as_namespace(namespace))

    def observe(self, *observers: RequestObserver) -> None:
        """Call these observers from now on, instead of those before.

        They also get events of requests that were added before.
        """
        self._notifier.observers = observers

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.requests)

    @property
    def num_running(self) -> int:
        """Answers that have their place in the batch and their pages."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that wait for it."""
        return len(self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """What was done so far."""
        return replace(
            self._did,
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
        """Generate for all ``prompts``; the completions come in their order.

        ``params`` are for all, or one for each. Raises what `stream` raises.
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
        """Generate for all ``prompts``, and give the tokens as they come.

        The ids of their requests are in the order of the prompts. Everything is checked before
        anything starts (see `add`), and what goes wrong later is raised: `OutOfPages` when
        sequences of others leave no room for one request. Closing the iterator early, or an error
        in between, gives all pages back. Requests that were added before are computed as well.
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
                arrays.append(self._checked(prompt))
                self._check(one)
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

    def _checked(self, prompt: str | TokensLike) -> TokenArray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidValue("text prompts need a tokenizer; give the engine one, or tokens")
            prompt = self.tokenizer.encode(prompt)
        tokens = as_tokens(prompt)
        runner = self.runner
        if not len(tokens):
            raise InvalidValue("it has no tokens; a prompt has at least one")
        pool = runner.num_pages * runner.page_size
        if len(tokens) > pool:
            raise InvalidValue(
                f"it has {len(tokens)} tokens and the pool holds {pool} "
                f"({runner.num_pages} pages of {runner.page_size}); give it more memory"
            )
        if len(tokens) > runner.max_tokens:
            raise InvalidValue(
                f"it has {len(tokens)} tokens, and the model is made for at most "
                f"{runner.max_tokens}"
            )
        if tokens.max() >= runner.vocabulary:
            raise InvalidValue(
                f"it has token {tokens.max()}; the model knows 0 … {runner.vocabulary - 1}"
            )
        return tokens

    def _search(self, params: SamplingParams, prompt_tokens: int) -> BeamSearch:
        return BeamSearch(
            params,
            self.runner.end_tokens,
            prompt_tokens=prompt_tokens,
            max_length=self.runner.max_tokens,
            ends=self._ends(params.stop),
        )

    def _ends(self, stop: tuple[str, ...]) -> Callable[[list[int]], bool] | None:
        """Whether a beam's tokens have a stop text in them."""
        tokenizer = self.tokenizer
        if not stop or tokenizer is None:
            return None

        def ends(tokens: list[int]) -> bool:
            text = tokenizer.decode(tokens)
            return any(one in text for one in stop)

        return ends

    def _check_cache(self) -> None:
        if not self.runner.serves(self.cache):
            raise IllegalStep(
                "this engine's runner was given to an engine with another cache, which writes over "
                "the same pages; give each cache a runner of its own"
            )

    def _check_model(self) -> None:
        """Refuse to go on with a model that was changed; a busy engine looks once a second."""
        now = time.monotonic()
        if not self.has_work or now - self._checked_at >= _CHECK_S:
            self.runner.check_model()
            self._checked_at = now

    def _check(self, params: SamplingParams) -> None:
        if self.tokenizer is None and params.stop:
            raise InvalidValue("stop texts need a tokenizer; give the engine one")
        if params.width > self.limits.max_running:
            raise InvalidValue(
                f"{params.width} answers are more than run at once ({self.limits.max_running}); "
                "ask for fewer, or raise max_running"
            )
        for token, _ in params.logit_bias:
            if token >= self.runner.vocabulary:
                raise InvalidValue(
                    f"logit_bias has token {token}; the model knows 0 … "
                    f"{self.runner.vocabulary - 1}"
                )
