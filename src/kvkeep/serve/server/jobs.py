"""What clients ask for, made into jobs for the engine: tokens, parameters, namespace.

These functions tokenize, so they are run in a tokenizer's thread. They raise `ApiError` for what
does not fit and `InvalidValue` for what cannot be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.worker import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import SamplingParams, Tokenizer
    from kvkeep.serve.server.schemas.base import SamplingRequest
    from kvkeep.serve.server.schemas.chat import ChatRequest, Message
    from kvkeep.serve.server.schemas.completions import CompletionRequest, Prompt
    from kvkeep.serve.server.schemas.kv import RemoveRequest
    from kvkeep.serve.server.schemas.see import ExplainRequest
    from kvkeep.serve.server.service import Service

__all__ = [
    "asked_tokens", "chat_jobs", "chat_tokens", "completion_jobs", "conversation_tokens", "echoes",
    "prompt_tokens", "refuse_far_too_long",
]  # fmt: skip

# As OpenAI's own.
_COMPLETION_TOKENS = 16
# Characters; texts of longer tokens on average are rare.
_LONG_TOKEN = 16
_PIECE = 1 << 16


def chat_jobs(service: Service, asked: ChatRequest) -> list[Job]:
    """The one job of a conversation."""
    asked.check_bias(service.engine.runner.vocabulary)
    prompt = conversation_tokens(service, asked.messages)
    room = _room(service, prompt)
    params = asked.sampling(
        max_tokens=min(asked.limit or room, room),
        draft_tokens=service.settings.draft_tokens,
        logprobs=asked.num_logprobs,
    )
    _runs_at_once(service, params)
    space = service.namespace(asked.cache_salt)
    return [_job(service, asked, prompt, params, space)]


def completion_jobs(service: Service, asked: CompletionRequest) -> list[Job]:
    """A job for each prompt, all or none."""
    asked.check_bias(service.engine.runner.vocabulary)
    _fits_the_queue(service, len(asked.prompt))
    space = service.namespace(asked.cache_salt)
    jobs = []
    for prompt in asked.prompt:
        tokens = prompt_tokens(service, prompt)
        room = _room(service, tokens)
        params = asked.sampling(
            max_tokens=min(asked.max_tokens or _COMPLETION_TOKENS, room),
            draft_tokens=service.settings.draft_tokens,
            logprobs=asked.logprobs,
            best_of=asked.best_of,
        )
        _runs_at_once(service, params)
        jobs.append(_job(service, asked, tokens, params, space))
    return jobs


def _job(
    service: Service,
    asked: SamplingRequest,
    prompt: TokenArray,
    params: SamplingParams,
    space: Namespace,
) -> Job:
    extras = asked.extras
    return Job(
        prompt=prompt,
        params=params,
        namespace=space,
        store=extras.store,
        answers=extras.answers and service.settings.answers,
        session=extras.session,
        turn=extras.turn,
    )


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[Message]) -> TokenArray:
    """The tokens of a conversation, ready for the model's answer."""
    if not tokenizer.has_chat_template:
        raise ApiError(
            400,
            "this model has no chat template; ask /v1/completions, or put a chat_template.jinja "
            "into the model's directory and restart the server",
            param="messages",
            code="no_chat_template",
        )
    try:
        return tokenizer.chat([message.as_turn() for message in messages])
    except InvalidValue as error:
        raise ApiError(400, str(error), param="messages") from error


def echoes(service: Service, asked: CompletionRequest) -> list[str]:
    """The prompts' texts, to be put before each answer. Call it once the prompts were checked."""
    return [
        prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)
        for prompt in asked.prompt
    ]


def prompt_tokens(service: Service, prompt: Prompt | Sequence[int]) -> TokenArray:
    """The tokens of a text or a list of tokens; `ApiError` for one that this server refuses."""
    if isinstance(prompt, str):
        refuse_far_too_long(service, "prompt", prompt)
        tokens = service.tokenizer.encode(prompt)
        if not len(tokens):
            raise ApiError(400, "prompt has no tokens; give it at least one", param="prompt")
        return _that_fit(service, "prompt", tokens)
    tokens = as_tokens(prompt)
    known = service.engine.runner.vocabulary
    if (largest := np.maximum.reduce(tokens)) >= known:
        message = f"prompt has token {largest}; the model knows 0 … {known - 1}"
        raise ApiError(400, message, param="prompt")
    return _that_fit(service, "prompt", tokens)


def conversation_tokens(service: Service, messages: Sequence[Message]) -> TokenArray:
    """The tokens of a conversation; `ApiError` for one that this server refuses."""
    refuse_far_too_long(service, "messages", *(turn.text for turn in messages))
    return _that_fit(service, "messages", chat_tokens(service.tokenizer, messages))


def asked_tokens(service: Service, asked: ExplainRequest | RemoveRequest) -> TokenArray:
    """The tokens of the prompt or the conversation that is asked about, as `prompt_tokens`."""
    if asked.messages is not None:
        return conversation_tokens(service, asked.messages)
    return prompt_tokens(service, asked.prompt or "")


def _that_fit(service: Service, field: str, prompt: TokenArray) -> TokenArray:
    if len(prompt) > service.longest_prompt:
        raise _too_long(service, field, f"{len(prompt)} tokens")
    return prompt


def _room(service: Service, prompt: TokenArray) -> int:
    """How many tokens can follow ``prompt``: one at least."""
    return service.engine.runner.max_tokens - len(prompt)


def refuse_far_too_long(service: Service, field: str, *texts: str) -> None:
    """Refuse what is too long by its size or its beginning: megabytes keep a tokenizer for seconds.

    A text of more bytes than so many of the longest token has more tokens than fit. Of others the
    beginning is tokenized in pieces: where it has twice the tokens that fit, no merge across the
    ends of pieces can undo that.
    """
    longest, room = service.longest_prompt, service.longest_text
    size = sum(map(len, texts))  # in characters, of a byte or more each
    if size > room or sum(len(text.encode(errors="replace")) for text in texts) > room:
        raise _too_long(
            service, field, f"more than {room} bytes, as many as {longest} of the longest token"
        )
    most = longest * _LONG_TOKEN
    if size <= most:
        return
    beginning = "".join(texts)[:most]
    found = 0
    for start in range(0, most, _PIECE):
        found += len(service.tokenizer.encode(beginning[start : start + _PIECE]))
        if found > 2 * longest:
            raise _too_long(service, field, f"more than {2 * longest} tokens")


def _too_long(service: Service, field: str, size: str) -> ApiError:
    most = service.longest_prompt
    message = f"{field} has {size}, and this server takes {most} at most"
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _runs_at_once(service: Service, params: SamplingParams) -> None:
    most = service.engine.limits.max_running
    if params.width > most:
        field = "kvkeep.beams" if params.beams else "best_of" if params.best_of else "n"
        message = f"{field} is {params.width}, and this server runs {most} answers at once"
        raise ApiError(400, message, param=field)


def _fits_the_queue(service: Service, prompts: int) -> None:
    most = service.engine.limits.max_waiting
    if most is not None and prompts > most:
        message = f"prompt is {prompts} prompts, and this server queues {most} at most"
        raise ApiError(400, message, param="prompt")
