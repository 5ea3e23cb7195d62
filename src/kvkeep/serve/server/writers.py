"""Builds the responses of chat and plain completions from the engine's deltas.

Also the two forms of server-sent events, OpenAI's and Anthropic's, and of log probabilities.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvkeep.serve.messages import error_event
from kvkeep.serve.server.schemas.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    ExtraUsage,
    MessageDelta,
    PromptDetails,
    ScoredToken,
    TokenScore,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvkeep.serve.engine import Choice, Completion, Delta, Tokenizer, TokenLogprob
    from kvkeep.serve.server.errors import ApiError
    from kvkeep.serve.server.pins import Keep
    from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = ["MESSAGES", "ChatWriter", "CompletionWriter", "Frames", "retained", "usage_of"]


class Frames(Protocol):
    """The form of a stream's events."""

    @property
    def last(self) -> bytes:
        """What ends a complete stream."""

    @property
    def ping(self) -> bytes:
        """An event without meaning, for streams that are silent; empty if the API has none."""

    def event(self, event: ResponseModel) -> bytes:
        """Return one event."""

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error, the last one of its stream."""


class _OpenAI:
    """Data only; ``[DONE]`` at the end."""

    last = b"data: [DONE]\n\n"
    ping = b""

    def event(self, event: ResponseModel) -> bytes:
        return b"data: %s\n\n" % event.model_dump_json().encode()

    def error(self, error: ApiError) -> bytes:
        return b"data: %s\n\n" % json.dumps(error.body()).encode()


class _Messages:
    """Each event has its type as its name; message_stop is the last."""

    last = b""
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def event(self, event: ResponseModel) -> bytes:
        fields: dict[str, Any] = event.model_dump()
        return self._named(fields)

    def error(self, error: ApiError) -> bytes:
        return self._named(error_event(error.status_code, str(error.detail)))

    def _named(self, event: dict[str, Any]) -> bytes:
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data.encode())


OPENAI: Frames = _OpenAI()
MESSAGES: Frames = _Messages()


_IMPOSSIBLE = -9999.0


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return tokens with their bytes, since a token may be a part of a character."""
    return ChatLogprobs(
        content=[
            ScoredToken(
                **_score(tokenizer, score.token, score.logprob).model_dump(),
                top_logprobs=[_score(tokenizer, token, logprob) for token, logprob in score.top],
            )
            for score in scores
        ]
    )


def _score(tokenizer: Tokenizer, token: int, logprob: float) -> TokenScore:
    data = tokenizer.token_bytes(token)
    return TokenScore(
        token=data.decode(errors="replace"), logprob=_finite(logprob), bytes=list(data)
    )


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by OpenAI's -9999."""
    return max(logprob, _IMPOSSIBLE)


class Offsets:
    """Computes where each token of one answer begins in its text, in characters.

    A token that begins inside a character has the offset of that character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def take(self, token: bytes) -> int:
        """Return the offset of the next token."""
        begins = self._characters
        self._characters += len(self._decoder.decode(token))
        return begins


def completion_logprobs(
    tokenizer: Tokenizer, scores: Iterable[TokenLogprob], offsets: Offsets
) -> CompletionLogprobs:
    """Return lists with one entry per token; ``offsets`` belongs to the same answer."""
    words = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for score in scores:
        words.tokens.append(_name(tokenizer, score.token))
        words.token_logprobs.append(_finite(score.logprob))
        words.top_logprobs.append(
            {_name(tokenizer, token): _finite(logprob) for token, logprob in score.top}
        )
        words.text_offset.append(offsets.take(tokenizer.token_bytes(score.token)))
    return words


def _name(tokenizer: Tokenizer, token: int) -> str:
    r"""Return a token's text, or ``bytes:\xe2`` if it is not whole characters."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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
