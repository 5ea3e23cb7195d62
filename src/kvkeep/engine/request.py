"""One request on its way through the engine, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvkeep.engine.sampling import generator
from kvkeep.engine.text import GrowingText

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from kvkeep.cache import Sequence
    from kvkeep.engine.sampling import SamplingParams
    from kvkeep.engine.text import Tokenizer

__all__ = ["Completion", "Delta", "FinishReason", "Request"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request produced.

    ``tokens`` are all generated ids, an end token or stop text's tokens included; ``text`` has
    neither, and is empty without a tokenizer. ``cached_tokens`` of the ``prompt_tokens`` were
    reused, not computed. ``ttft_s`` and ``seconds`` run from the call to the first and to the
    last token. ``finish_reason``: "stop" (end token or stop text) or "length" (``max_tokens``, or
    the pool or the model takes no longer sequence).
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    seconds: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """One more token of prompt number ``index``, with the text that became final by it.

    The last one of a request carries its ``completion``.
    """

    index: int
    token: int
    text: str
    completion: Completion | None = None


class Request:
    """A prompt and what has been generated for it. Belongs to one engine call."""

    def __init__(
        self,
        index: int,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        device: torch.device,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.params = params
        self.source = generator(params, device)
        self.generated: list[int] = []
        self.sequence: Sequence | None = None
        self.cached_tokens: int | None = None
        self._prompt = prompt
        self._text = None if tokenizer is None else GrowingText(tokenizer, params.stop)
        self._begun = perf_counter()
        self._first = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._prompt) + len(self.generated)

    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and generated tokens, as one array."""
        return np.concatenate((self._prompt, np.array(self.generated, np.int32)))

    def accept(self, token: int, end_tokens: frozenset[int], max_tokens: int) -> Delta:
        """Take the next token; the delta says whether it was the last."""
        now = perf_counter()
        if not self.generated:
            self._first = now
        self.generated.append(token)
        ended = token in end_tokens and not self.params.ignore_eos
        text = ""
        if self._text is not None and not ended:
            text = self._text.add(token)
            ended = self._text.stopped
        full = len(self.generated) >= self.params.max_tokens or self.num_tokens >= max_tokens
        if not ended and not full:
            return Delta(self.index, token, text)
        if self._text is not None:
            text += self._text.finish()
        completion = Completion(
            text="" if self._text is None else self._text.text,
            tokens=tuple(self.generated),
            prompt_tokens=len(self._prompt),
            cached_tokens=self.cached_tokens or 0,
            ttft_s=self._first - self._begun,
            seconds=now - self._begun,
            finish_reason="stop" if ended else "length",
        )
        return Delta(self.index, token, text, completion)
