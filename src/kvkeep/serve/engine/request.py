"""`Request`: a prompt on its way through the engine, with its parameters and answers.

A request has one `Answer` while its prompt is computed, and ``params.n`` of them afterwards,
forked from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from kvkeep.observe.usage import RequestEnded, RequestOrigin, RequestRecord
from kvkeep.serve.engine.answer import Answer
from kvkeep.serve.engine.results import Completion
from kvkeep.serve.engine.sampling import fresh_seed

if TYPE_CHECKING:
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.usage import Outcome
    from kvkeep.serve.engine.params import SamplingParams
    from kvkeep.serve.engine.results import Choice
    from kvkeep.serve.engine.text import Tokenizer

__all__ = ["CacheUse", "Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """A request's use of cache and store; see `Engine.add`."""

    namespace: Namespace
    store: bool = True
    answers: bool = True
    session: str | None = None


class Request:
    """A prompt, its parameters, and its answers. Made by `Engine.add`; belongs to its engine.

    ``id`` counts up in order of arrival. ``store`` False publishes nothing; ``answers`` False
    writes the KV of the prompt alone to a store.
    """

    def __init__(
        self,
        id: int,
        prompt: TokenArray,
        params: SamplingParams,
        use: CacheUse,
        *,
        tokenizer: Tokenizer | None,
        origin: RequestOrigin | None = None,
    ) -> None:
        self.id = id
        origin = RequestOrigin(str(id)) if origin is None else origin
        self.record = RequestRecord(origin, prompt, use.namespace, use.session, use.store)
        """The description of this request in each event for observers."""
        self.prompt = prompt
        self.params = params
        self.namespace = use.namespace
        self.store = use.store
        self.answers = use.answers
        self.session = use.session
        self.tokenizer = tokenizer
        self.cached_tokens: int | None = None
        """Prompt tokens reused from pool and store; None before the first admission."""
        self.loaded_tokens = 0
        """Those of ``cached_tokens`` that came from the store."""
        self.lossy_tokens = 0
        """Those of ``loaded_tokens`` that are not exact."""
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.live: list[Answer] = [Answer(self, 0)]
        """Answers that wait or run."""
        self.ended: list[Answer] = []
        self._began = perf_counter()
        self._first_token = 0.0

    def __repr__(self) -> str:
        return (
            f"<Request {self.id}: {len(self.prompt)} prompt tokens, {len(self.live)} live answers, "
            f"{len(self.ended)} ended>"
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt)

    @property
    def forked(self) -> bool:
        """Whether the prompt is computed and its answers are separate."""
        return bool(self.ended) or len(self.live) > 1 or bool(self.live and self.live[0].generated)

    def note_loaded(self, tokens: int, lossy: int) -> None:
        """Count prompt tokens that came from the store, and those of them that are not exact."""
        self.loaded_tokens += tokens
        self.lossy_tokens += lossy
        self.cached_tokens = (self.cached_tokens or 0) + tokens

    def first_token_now(self) -> None:
        """Set the time of the first token, once."""
        if not self._first_token:
            self._first_token = perf_counter()

    def completion(self, choices: tuple[Choice, ...]) -> Completion:
        """Return the result of this request, which ends now, with these finished answers."""
        now = perf_counter()
        return Completion(
            choices=choices,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens or 0,
            ttft_s=(self._first_token or now) - self._began,
            seconds=now - self._began,
            loaded_tokens=self.loaded_tokens,
            lossy_tokens=self.lossy_tokens,
        )

    def ended_as(self, completion: Completion) -> RequestEnded:
        """Return the event of the request's completion."""
        generated = sum(len(choice.tokens) for choice in completion.choices)
        return RequestEnded(self.record, "done", generated, completion.ttft_s, completion.seconds)

    def ended_now(self, outcome: Outcome) -> RequestEnded:
        """Return the event of an end without completion, with the tokens handed out so far."""
        now, first = perf_counter(), self._first_token
        ttft_s = first - self._began if first else None
        generated = sum(answer.handed_out for answer in (*self.live, *self.ended))
        return RequestEnded(self.record, outcome, generated, ttft_s, now - self._began)
