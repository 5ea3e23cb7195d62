"""`Engine`: prompts in, completions out, over a runner and a paged cache.

A batch is admitted as far as pages allow: each prompt is prefilled on its own, so that the next
one already finds what it shares with it, then all decode together. A request that finishes makes
room for those that wait. When a sequence cannot grow, the youngest gives its pages back and comes
again later; what it computed stays cached as long as there is room.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.engine.batch import Piece
from kvkeep.engine.request import Completion, Delta, Request
from kvkeep.engine.sampling import SamplingParams, choose
from kvkeep.errors import InvalidValue, OutOfPages
from kvkeep.keys import Namespace
from kvkeep.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Row

    import torch

    from kvkeep.cache import PagedCache, Sequence
    from kvkeep.engine.runner import Runner
    from kvkeep.engine.text import Tokenizer
    from kvkeep.keys import NamespaceLike
    from kvkeep.tokens import TokenArray, TokensLike

__all__ = ["Engine"]

_GREEDY = SamplingParams()
# Nobody publishes here, so nothing is found here.
_NOTHING_PUBLISHED = Namespace(tenant="kvkeep engine without reuse")


class _Running(NamedTuple):
    request: Request
    sequence: Sequence


class Engine:
    """Generates with a `Runner` from the pages of a `PagedCache` of the same measures.

    ``tokenizer`` turns text prompts into tokens and tokens into text; without one, prompts are
    token ids and completions have no text. ``reuse=False`` computes every prompt in full and
    leaves nothing behind. ``max_batch`` sequences decode together; ``prefill_tokens`` of a prompt
    are computed at a time, which bounds the memory that a long one takes.

    Thread safety: none; one call at a time. Several engines may share a cache, not a runner.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PagedCache,
        tokenizer: Tokenizer | None = None,
        *,
        reuse: bool = True,
        max_batch: int = 32,
        prefill_tokens: int = 2048,
    ) -> None:
        theirs, ours = (cache.num_pages, cache.page_size), (runner.num_pages, runner.page_size)
        if theirs != ours:
            raise InvalidValue(
                f"the cache has {theirs[0]} pages of {theirs[1]} tokens and the runner {ours[0]} "
                f"of {ours[1]}; give both the same"
            )
        if max_batch < 1 or prefill_tokens < 1:
            raise InvalidValue(
                f"max_batch and prefill_tokens are 1 or more, got {max_batch} and {prefill_tokens}"
            )
        self.runner = runner
        self.cache = cache
        self.tokenizer = tokenizer
        self._reuse = reuse
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens

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
            delta.index: delta.completion
            for delta in self.stream(prompts, params, namespace=namespace)
            if delta.completion is not None
        }
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Row[str | TokensLike],
        params: SamplingParams | Row[SamplingParams] = _GREEDY,
        *,
        namespace: NamespaceLike = "",
    ) -> Iterator[Delta]:
        """Generate for all ``prompts``, token by token as they come.

        Everything is checked before anything starts: `InvalidValue` for a prompt that is empty,
        has tokens the model does not know, or is longer than the pool or the model allows.
        `OutOfPages` when sequences of others leave no room for one request. Closing the iterator
        early, or an error in between, gives all pages back.
        """
        return self._run(self._requests(prompts, params), namespace)

    # --- before anything starts --------------------------------------------------------------

    def _requests(
        self, prompts: Row[str | TokensLike], params: SamplingParams | Row[SamplingParams]
    ) -> list[Request]:
        if isinstance(prompts, str):
            raise InvalidValue("prompts is a list of prompts; for one, write [prompt]")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidValue(f"{len(prompts)} prompts need as many params, got {len(each)}")
        arrays = [self._checked(number, prompt) for number, prompt in enumerate(prompts)]
        if self.tokenizer is None and any(one.stop for one in each):
            raise InvalidValue("stop texts need a tokenizer; give the engine one")
        return [
            Request(index, tokens, one, device=self.runner.device, tokenizer=self.tokenizer)
            for index, (tokens, one) in enumerate(zip(arrays, each, strict=True))
        ]

    def _checked(self, number: int, prompt: str | TokensLike) -> TokenArray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidValue("text prompts need a tokenizer; give the engine one, or tokens")
            prompt = self.tokenizer.encode(prompt)
        tokens = as_tokens(prompt)
        runner = self.runner
        if not len(tokens):
            raise InvalidValue(f"prompt {number} has no tokens; a prompt has at least one")
        pool = runner.num_pages * runner.page_size
        if len(tokens) > pool:
            raise InvalidValue(
                f"prompt {number} has {len(tokens)} tokens and the pool holds {pool} "
                f"({runner.num_pages} pages of {runner.page_size}); give it more memory"
            )
        if len(tokens) > runner.max_tokens:
            raise InvalidValue(
                f"prompt {number} has {len(tokens)} tokens, and the model is made for at most "
                f"{runner.max_tokens}"
            )
        if tokens.max() >= runner.vocabulary:
            raise InvalidValue(
                f"prompt {number} has token {tokens.max()}; the model knows 0 … "
                f"{runner.vocabulary - 1}"
            )
        return tokens

    # --- the loop ----------------------------------------------------------------------------

    def _run(self, requests: list[Request], namespace: NamespaceLike) -> Iterator[Delta]:
        waiting = deque(requests)
        running: list[_Running] = []  # oldest first
        try:
            while waiting or running:
                yield from self._admit(waiting, running, namespace)
                # Room is taken again only when a request has finished: one that was preempted and
                # came back at once would only be preempted again.
                finished = not running
                while running and not finished:
                    self._grow(waiting, running)
                    for delta in self._decode(running):
                        finished |= delta.completion is not None
                        yield delta
        finally:
            for _, sequence in running:
                sequence.close(keep=self._reuse)

    def _admit(
        self, waiting: deque[Request], running: list[_Running], namespace: NamespaceLike
    ) -> Iterator[Delta]:
        """Open and prefill what fits; each prefilled prompt yields its next token."""
        while waiting and len(running) < self._max_batch:
            request = waiting[0]
            space = namespace if self._reuse else _NOTHING_PUBLISHED
            try:
                one = _Running(request, self.cache.open(request.tokens(), space))
            except OutOfPages:
                if not running:
                    raise
                return
            running.append(one)
            waiting.popleft()
            logits = self._prefill(one.sequence)
            if request.cached_tokens is None:
                request.cached_tokens = one.sequence.num_cached
            yield from self._accept(logits, [one], running)

    def _prefill(self, sequence: Sequence) -> torch.Tensor:
        """Compute what is not cached; returns the logits of the last token [1, vocabulary]."""
        self.runner.copy(sequence.copies())
        logits = None
        for start in range(sequence.num_cached, sequence.num_tokens, self._prefill_tokens):
            tokens = sequence.tokens[start : start + self._prefill_tokens]
            logits = self.runner.forward([Piece(tokens, start, sequence.pages)])
            self._publish(sequence, start + len(tokens))
        assert logits is not None, "the last prompt token is always left to compute"
        return logits

    def _grow(self, waiting: deque[Request], running: list[_Running]) -> None:
        """Give each sequence room for the token that it computes next, the oldest first."""
        ready = 0
        while ready < len(running):
            request, sequence = running[ready]
            try:
                sequence.append(request.generated[-1])
            except OutOfPages:
                if len(running) == 1:
                    raise
                youngest = running.pop()
                youngest.sequence.close(keep=self._reuse)
                waiting.appendleft(youngest.request)
                continue
            self.runner.copy(sequence.copies())
            ready += 1

    def _decode(self, running: list[_Running]) -> Iterator[Delta]:
        """One token for each running sequence."""
        pieces = [
            Piece(sequence.tokens[-1:], sequence.num_tokens - 1, sequence.pages)
            for _, sequence in running
        ]
        logits = self.runner.forward(pieces)
        for _, sequence in running:
            self._publish(sequence, sequence.num_tokens)
        yield from self._accept(logits, list(running), running)

    def _accept(
        self, logits: torch.Tensor, ones: list[_Running], running: list[_Running]
    ) -> Iterator[Delta]:
        """Choose the next token of each of ``ones``; close those that are finished."""
        tokens = choose(
            logits, [one.request.params for one in ones], [one.request.source for one in ones]
        )
        for one, token in zip(ones, tokens, strict=True):
            delta = one.request.accept(token, self.runner.end_tokens, self.runner.max_tokens)
            if delta.completion is not None:
                running.remove(one)
                one.sequence.close(keep=self._reuse)
            yield delta

    def _publish(self, sequence: Sequence, computed: int) -> None:
        if self._reuse:
            sequence.publish(computed)
