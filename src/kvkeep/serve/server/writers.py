"""Builds the responses of chat and plain completions from the engine's deltas."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from kvkeep.serve.server.framing import OPENAI
from kvkeep.serve.server.schemas.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    ExtraUsage,
    MessageDelta,
    PromptDetails,
    Usage,
)
from kvkeep.serve.server.scores import Offsets, chat_logprobs, completion_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvkeep.serve.engine import Choice, Completion, Delta, Tokenizer, TokenLogprob
    from kvkeep.serve.server.framing import Frames
    from kvkeep.serve.server.pins import Keep
    from kvkeep.serve.server.schemas.responses import ChatLogprobs, CompletionLogprobs

__all__ = ["ChatWriter", "CompletionWriter", "retained", "usage_of"]


class _Writer:
    """The common part: id, time and options of one response."""

    PREFIX: ClassVar[str]
    frames: ClassVar[Frames] = OPENAI

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, n: int, logprobs: bool, usage: bool
    ) -> None:
        self.id = f"{self.PREFIX}-{secrets.token_hex(12)}"
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs = logprobs
        self._usage = usage
        self.retains: Sequence[Keep] = ()
        """What its prompts ask to be kept in the tiers; set it before the last delta."""


class ChatWriter(_Writer):
    """Builds the response of ``/v1/chat/completions``: one job, n choices."""

    PREFIX = "chatcmpl"

    def begin(self) -> Iterator[ChatChunk]:
        """Yield each choice's role."""
        for index in range(self._n):
            yield self._chunk(index, MessageDelta(role="assistant", content=""))

    def more(self, number: int, delta: Delta) -> Iterator[ChatChunk]:
        """Yield the text that became final, then the finish reason."""
        if delta.text or delta.logprobs:
            chunk = self._chunk(delta.index, MessageDelta(content=delta.text))
            chunk.choices[0].logprobs = self._scores(delta.logprobs)
            yield chunk
        if delta.finish_reason is not None:
            chunk = self._chunk(delta.index, MessageDelta())
            chunk.choices[0].finish_reason = delta.finish_reason
            yield chunk

    def end(self, completions: Sequence[Completion]) -> Iterator[ChatChunk]:
        """Yield the usage, if requested."""
        if self._usage:
            chunk = self._chunk(0, MessageDelta())
            chunk.choices = []
            chunk.usage = usage_of(completions, self.retains)
            yield chunk

    def whole(self, completions: Sequence[Completion]) -> ChatResponse:
        """Return the complete response."""
        (completion,) = completions
        return ChatResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(choice) for choice in completion.choices],
            usage=usage_of(completions, self.retains),
        )

    def _choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=self._scores(choice.logprobs),
            finish_reason=choice.finish_reason,
        )

    def _scores(self, scores: Iterable[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, scores) if self._logprobs else None

    def _chunk(self, index: int, delta: MessageDelta) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[ChatChunkChoice(index=index, delta=delta)],
        )


class CompletionWriter(_Writer):
    """Builds the response of ``/v1/completions``: n choices for each of the prompts.

    ``echoes`` are the prompts' texts, if they are to be repeated: set them before `begin`.
    """

    PREFIX = "cmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        n: int,
        logprobs: bool,
        usage: bool,
        prompts: int,
    ) -> None:
        super().__init__(model, tokenizer, n=n, logprobs=logprobs, usage=usage)
        self.echoes = [""] * prompts
        self._offsets: dict[int, Offsets] = defaultdict(Offsets)

    def begin(self) -> Iterator[CompletionResponse]:
        """Yield each choice's echo."""
        for number, echo in enumerate(self.echoes):
            for index in range(self._n) if echo else ():
                yield self._answer(CompletionChoice(index=number * self._n + index, text=echo))

    def more(self, number: int, delta: Delta) -> Iterator[CompletionResponse]:
        """Yield the text that became final, and the finish reason."""
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            index = number * self._n + delta.index
            yield self._answer(
                CompletionChoice(
                    index=index,
                    text=delta.text,
                    logprobs=self._scores(index, delta.logprobs),
                    finish_reason=delta.finish_reason,
                )
            )

    def end(self, completions: Sequence[Completion]) -> Iterator[CompletionResponse]:
        """Yield the usage, if requested."""
        if self._usage:
            last = self._answer()
            last.usage = usage_of(completions, self.retains)
            yield last

    def whole(self, completions: Sequence[Completion]) -> CompletionResponse:
        """Return the complete response."""
        answer = self._answer(
            *(
                self._choice(number, choice)
                for number, completion in enumerate(completions)
                for choice in completion.choices
            )
        )
        answer.usage = usage_of(completions, self.retains)
        return answer

    def _choice(self, number: int, choice: Choice) -> CompletionChoice:
        index = number * self._n + choice.index
        return CompletionChoice(
            index=index,
            text=self.echoes[number] + choice.text,
            logprobs=self._scores(index, choice.logprobs),
            finish_reason=choice.finish_reason,
        )

    def _scores(self, index: int, scores: Iterable[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        return completion_logprobs(self._tokenizer, scores, self._offsets[index])

    def _answer(self, *choices: CompletionChoice) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self._created, model=self._model, choices=list(choices)
        )


def usage_of(completions: Sequence[Completion], retains: Sequence[Keep] = ()) -> Usage:
    """Return the token counts, summed over all prompts and answers."""
    prompt = sum(completion.prompt_tokens for completion in completions)
    generated = sum(
        len(choice.tokens) for completion in completions for choice in completion.choices
    )
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(
            cached_tokens=sum(completion.cached_tokens for completion in completions)
        ),
        kvkeep=ExtraUsage(
            loaded_tokens=sum(completion.loaded_tokens for completion in completions),
            lossy_tokens=sum(completion.lossy_tokens for completion in completions) or None,
            **retained(retains),
        ),
    )


def retained(retains: Sequence[Keep]) -> dict[str, Any]:
    """Return what usage says of prompts that were to be kept in the tiers; nothing without any."""
    if not retains:
        return {}
    lost = [keep for keep in retains if keep.unpinned_tokens]
    said: dict[str, Any] = {
        "retained_tokens": sum(keep.pinned_tokens for keep in retains),
        "unretained_tokens": sum(keep.unpinned_tokens for keep in lost),
    }
    return {**said, "unretained": lost[0].why} if lost else said
