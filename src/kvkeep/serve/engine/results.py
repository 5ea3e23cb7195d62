"""Results of a request: `Delta` while it runs; `Choice` and `Completion` when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvkeep.serve.engine.logprobs import TokenLogprob
    from kvkeep.serve.engine.request import Request

__all__ = ["Choice", "Completion", "Delta", "FinishReason"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    ``tokens`` are all generated ids, including an end token or a stop text's tokens; ``text``
    excludes both, and is empty without a tokenizer. ``finish_reason`` is "stop" (end token or stop
    text) or "length" (``max_tokens``, or the longest sequence of pool or model). ``stop`` is the
    stop text that ended it, None if none did. ``logprobs`` has one entry a token if the request
    asked for them.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers of a finished request.

    ``cached_tokens`` of the ``prompt_tokens`` were reused, of which ``loaded_tokens`` came from the
    store, of which ``lossy_tokens`` are not exact. ``ttft_s`` and ``seconds`` run from the
    request's arrival to its first and last token.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    seconds: float
    loaded_tokens: int = 0
    lossy_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of answer ``index`` of a request, and the text that became final with them.

    An answer's last delta has its ``finish_reason``; a request's last delta has its
    ``completion``, or the ``error`` that ended it.
    """

    request: Request
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    error: Exception | None = None
