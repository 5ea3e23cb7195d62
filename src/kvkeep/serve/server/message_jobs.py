"""Turns requests of ``/v1/messages`` into jobs; these functions tokenize, see `jobs`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import SamplingParams
from kvkeep.serve.messages import LONG_S, marked, read_call
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.jobs import (
    refuse_far_too_long,
    refuse_without_template,
    room_behind,
    that_fit,
)
from kvkeep.serve.server.pins import Keep
from kvkeep.serve.server.schemas.base import Extras
from kvkeep.serve.server.worker import Job

if TYPE_CHECKING:
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.messages import MessagesCall
    from kvkeep.serve.server.message_writer import MessageWriter
    from kvkeep.serve.server.schemas.messages import CountTokensRequest, MessagesRequest
    from kvkeep.serve.server.service import Service

__all__ = ["call_of", "message_jobs", "message_prompt"]

_OURS = frozenset({"cache_salt", "kvkeep"})


class MessagePrompt(NamedTuple):
    """The tokens of a prompt, and its breakpoints: (position in tokens, seconds to live)."""

    tokens: TokenArray
    breakpoints: tuple[tuple[int, float], ...]


def call_of(body: CountTokensRequest) -> MessagesCall:
    """Return the translated request; `InvalidValue` for what Anthropic's API refuses."""
    fields = body.model_dump(exclude_none=True)
    return read_call({"max_tokens": 0, **fields}, more=_OURS)


def message_jobs(service: Service, body: MessagesRequest, writer: MessageWriter) -> list[Job]:
    """Return the one job of a request; tell ``writer`` what it must know of the prompt."""
    call = call_of(body)
    extras = body.kvkeep or Extras()
    prompt = message_prompt(service, call)
    room = room_behind(service, prompt.tokens)
    params = SamplingParams(
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        top_k=call.top_k or 0,
        max_tokens=max(1, min(call.max_tokens, room)),
        stop=call.stop,
        draft_tokens=extras.draft_tokens or 0,
    )
    writer.call = call
    writer.keep = keep = Keep(prompt.breakpoints)
    long = [(at, seconds) for at, seconds in prompt.breakpoints if seconds >= LONG_S]
    if long and service.tier_pins is not None:
        writer.retain = Keep(long)
    return [
        Job(
            prompt=prompt.tokens,
            params=params,
            namespace=service.namespace(body.cache_salt),
            store=extras.store,
            answers=extras.answers,
            session=extras.session,
            keep=keep if keep.wanted else None,
            retain=writer.retain,
        )
    ]


def message_prompt(service: Service, call: MessagesCall) -> MessagePrompt:
    """Return the tokens of a conversation and of its breakpoints.

    Raises `ApiError` for a conversation that the model's chat template cannot express.
    """
    tokenizer = service.tokenizer
    refuse_without_template(tokenizer)
    shown = [] if call.tool_choice == "none" else call.tools
    refuse_far_too_long(service, "messages", [call.messages, shown])
    _check_tools(service, call)
    text = _rendered(service, call, call.messages, call.tools)
    ends = []
    for one in call.breakpoints:
        other = _rendered(service, call, *marked(call, one))
        ends.append(_common(text, other))
    tokens, places = tokenizer.encode_rendered(text, ends)
    times = (one.ttl_s for one in call.breakpoints)
    return MessagePrompt(
        that_fit(service, "messages", tokens), tuple(zip(places, times, strict=True))
    )


def _check_tools(service: Service, call: MessagesCall) -> None:
    used = call.tools and call.tool_choice != "none"
    spoken = any(turn["role"] == "tool" or "tool_calls" in turn for turn in call.messages)
    if (used or spoken) and not service.tokenizer.knows_tools:
        message = "tools: this model's chat template has no tools; leave them out"
        raise ApiError(400, message, param="tools")
    if used and call.tool_choice not in {None, "auto"}:
        message = "tool_choice: this server cannot force a tool call; use auto or none"
        raise ApiError(400, message, param="tool_choice")


def _rendered(
    service: Service,
    call: MessagesCall,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> str:
    shown = [] if call.tool_choice == "none" else tools
    try:
        return service.tokenizer.rendered(
            [_as_turn(turn) for turn in messages], tools=shown, continued=call.continued
        )
    except InvalidValue as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error


def _as_turn(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: arguments as objects, and always a content."""
    turn = {**message, "content": message["content"] or ""}
    if "tool_calls" in message:
        turn["tool_calls"] = [
            {**one, "function": {**one["function"], "arguments": _loaded(one["function"])}}
            for one in message["tool_calls"]
        ]
    return turn


def _loaded(function: dict[str, Any]) -> Any:
    return json.loads(function["arguments"])


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix. Cost: a few comparisons of memory."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
