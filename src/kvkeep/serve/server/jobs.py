"""Turns request bodies into jobs for the engine: tokens, parameters, namespace.

These functions tokenize, so they run in a tokenizer thread. They raise `ApiError` or `InvalidValue`
for requests that this server refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.http import texts_in
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.pins import Keep
from kvkeep.serve.server.worker import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import SamplingParams, Tokenizer
    from kvkeep.serve.server.schemas.base import SamplingRequest
    from kvkeep.serve.server.schemas.chat import ChatRequest, Message
    from kvkeep.serve.server.schemas.completions import CompletionRequest, Prompt
    from kvkeep.serve.server.schemas.kv import PromptRequest
    from kvkeep.serve.server.service import Service

__all__ = [
    "chat_jobs", "chat_tokens", "completion_jobs", "conversation_tokens", "echoes",
    "prompt_tokens", "refuse_far_too_long", "refuse_without_template", "request_tokens",
    "room_behind", "that_fit",
]  # fmt: skip

# OpenAI's default.
_COMPLETION_TOKENS = 16
# Characters; hardly any text has longer tokens on average.
_LONG_TOKEN = 16
_PIECE = 1 << 16


def chat_jobs(service: Service, body: ChatRequest) -> list[Job]:
    """Return the one job of a conversation."""
    body.check_bias(service.engine.runner.vocabulary)
    prompt = conversation_tokens(service, body.messages)
    room = room_behind(service, prompt)
    params = body.sampling(
        max_tokens=min(body.limit or room, room),
        logprobs=body.num_logprobs,
    )
    _runs_at_once(service, params)
    space = service.namespace(body.cache_salt)
    return [_job(service, body, prompt, params, space)]


def completion_jobs(service: Service, body: CompletionRequest) -> list[Job]:
    """Return a job for each prompt."""
    body.check_bias(service.engine.runner.vocabulary)
    _fits_the_queue(service, len(body.prompt))
    space = service.namespace(body.cache_salt)
    jobs = []
    for prompt in body.prompt:
        tokens = prompt_tokens(service, prompt)
        room = room_behind(service, tokens)
        params = body.sampling(
            max_tokens=min(body.max_tokens or _COMPLETION_TOKENS, room),
            logprobs=body.logprobs,
        )
        _runs_at_once(service, params)
        jobs.append(_job(service, body, tokens, params, space))
    return jobs


def _job(
    service: Service,
    body: SamplingRequest,
    prompt: TokenArray,
    params: SamplingParams,
    space: Namespace,
) -> Job:
    extras = body.extras
    seconds = body.retention_s
    return Job(
        prompt=prompt,
        params=params,
        namespace=space,
        store=extras.store,
        answers=extras.answers,
        session=body.session,
        retain=None if seconds is None else Keep([(len(prompt), seconds)]),
    )


def chat_tokens(service: Service, messages: Sequence[Message]) -> TokenArray:
    """Return the tokens of a conversation, up to where the model's turn begins.

    Raises `ApiError` for one that is far too long; `that_fit` refuses one that is a little longer.
    """
    turns = [message.as_turn() for message in messages]
    refuse_far_too_long(service, "messages", turns)
    refuse_without_template(service.tokenizer)
    try:
        return service.tokenizer.chat(turns)
    except InvalidValue as error:
        raise ApiError(400, str(error), param="messages") from error


def refuse_without_template(tokenizer: Tokenizer) -> None:
    """Raise `ApiError` for a model without a chat template."""
    if not tokenizer.has_chat_template:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or add a chat_template.jinja to "
            "the model's directory and restart the server",
            param="messages",
            code="no_chat_template",
        )


def echoes(service: Service, body: CompletionRequest) -> list[str]:
    """Return the prompts' texts, to precede each answer. Call it after the prompts are checked."""
    return [
        prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)
        for prompt in body.prompt
    ]


def prompt_tokens(service: Service, prompt: Prompt | Sequence[int]) -> TokenArray:
    """Return the tokens of a text or a list of tokens; `ApiError` if this server refuses them."""
    if isinstance(prompt, str):
        refuse_far_too_long(service, "prompt", prompt)
        tokens = service.tokenizer.encode(prompt)
        if not len(tokens):
            raise ApiError(400, "prompt has no tokens; give it at least one", param="prompt")
        return that_fit(service, "prompt", tokens)
    tokens = as_tokens(prompt)
    known = service.engine.runner.vocabulary
    if (largest := np.maximum.reduce(tokens)) >= known:
        message = f"prompt has token {largest}; the model knows 0 … {known - 1}"
        raise ApiError(400, message, param="prompt")
    return that_fit(service, "prompt", tokens)


def conversation_tokens(service: Service, messages: Sequence[Message]) -> TokenArray:
    """Return the tokens of a conversation; `ApiError` if this server refuses them."""
    return that_fit(service, "messages", chat_tokens(service, messages))


def request_tokens(service: Service, body: PromptRequest) -> TokenArray:
    """Return the tokens of the prompt or conversation in ``body``; see `prompt_tokens`."""
    if body.messages is not None:
        return conversation_tokens(service, body.messages)
    return prompt_tokens(service, body.prompt or "")


def that_fit(service: Service, field: str, prompt: TokenArray) -> TokenArray:
    """Return ``prompt``; `ApiError` if it is longer than this server accepts."""
    if len(prompt) > service.longest_prompt:
        raise _too_long(service, field, f"{len(prompt)} tokens")
    return prompt


def room_behind(service: Service, prompt: TokenArray) -> int:
    """Return how many tokens fit behind ``prompt``, at least one."""
    return service.engine.runner.max_tokens - len(prompt)


def refuse_far_too_long(service: Service, field: str, prompt: object) -> None:
    """Refuse a prompt by its size or beginning, since megabytes keep a tokenizer busy for seconds.

    ``prompt`` is a text, or a JSON value with every text that a chat template can show.

    A text is too long if it has more bytes than the longest prompt could have, repeating the
    longest token. Of other long texts the beginning is tokenized, in pieces: if it has twice the
    tokens that fit, merges across piece boundaries cannot make it fit.
    """
    texts = list(texts_in(prompt))
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
    message = f"{field} has {size}, but this server accepts at most {most}"
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _runs_at_once(service: Service, params: SamplingParams) -> None:
    most = service.engine.limits.max_running
    if params.n > most:
        message = f"n is {params.n}, but this server runs at most {most} answers at once"
        raise ApiError(400, message, param="n")


def _fits_the_queue(service: Service, prompts: int) -> None:
    most = service.engine.limits.max_waiting
    if most is not None and prompts > most:
        message = f"prompt is {prompts} prompts, but this server queues at most {most}"
        raise ApiError(400, message, param="prompt")
