"""``/v1/messages``: requests into jobs, and the engine's deltas into answers.

What makes jobs tokenizes, see `jobs`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import SamplingParams
from kvkeep.serve.messages import LONG_S, MessageEvents, marked, new_id, read_call, split_usage
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.jobs import (
    refuse_far_too_long,
    refuse_without_template,
    room_behind,
    that_fit,
)
from kvkeep.serve.server.pins import Keep
from kvkeep.serve.server.schemas.base import Extras
from kvkeep.serve.server.schemas.messages import MessageEvent, MessageResponse
from kvkeep.serve.server.worker import Job
from kvkeep.serve.server.writers import MESSAGES, retained

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Choice, Completion, Delta
    from kvkeep.serve.messages import MessagesCall, MessageUsage
    from kvkeep.serve.server.schemas.messages import CountTokensRequest, MessagesRequest
    from kvkeep.serve.server.service import Service
    from kvkeep.serve.server.writers import Frames

__all__ = ["MessageWriter", "call_of", "message_jobs", "message_prompt"]


class MessageWriter:
    """Builds one message.

    ``keep`` has the breakpoints and what became of them, ``retain`` those that are kept in the
    tiers, and ``call`` is the request: set them before the first delta. The first event waits for
    the first token, because it has the tokens that were read from the cache.
    """

    frames: ClassVar[Frames] = MESSAGES

    def __init__(self, model: str) -> None:
        self.id = new_id()
        self.call: MessagesCall | None = None
        self.keep = Keep(())
        self.retain: Keep | None = None
        self._events = MessageEvents(self.id, model)
        self._begun = False

    def begin(self) -> Iterator[MessageEvent]:
        """Yield nothing."""
        return iter(())

    def more(self, number: int, delta: Delta) -> Iterator[MessageEvent]:
        """Yield the beginning of the message before the first text, and the text."""
        if not self._begun:
            self._begun = True
            cached = delta.request.cached_tokens or 0
            usage = split_usage(delta.request.prompt_tokens, cached, self.keep.wanted)
            yield from _made(self._events.start(usage))
        if self._answers:
            yield from _made(self._events.text(delta.text))

    def end(self, completions: Sequence[Completion]) -> Iterator[MessageEvent]:
        """Yield the end of the text, the reason and the usage."""
        (completion,) = completions
        reason, stop = self._reason(completion.choices[0])
        yield from _made(self._events.end(reason, stop, self._usage(completion)))

    def whole(self, completions: Sequence[Completion]) -> MessageResponse:
        """Return the complete message."""
        (completion,) = completions
        usage, choice = self._usage(completion), completion.choices[0]
        self._events.start(usage)
        if self._answers:
            self._events.text(choice.text)
        self._events.end(*self._reason(choice), usage)
        return MessageResponse(**self._events.message)

    @property
    def _answers(self) -> bool:
        """Whether an answer is wanted, not only a cached prompt."""
        assert self.call is not None
        return self.call.max_tokens > 0

    def _reason(self, choice: Choice) -> tuple[str, str | None]:
        assert self.call is not None
        if choice.finish_reason == "stop":
            return ("end_turn", None) if choice.stop is None else ("stop_sequence", choice.stop)
        if len(choice.tokens) < self.call.max_tokens:
            return "model_context_window_exceeded", None
        return "max_tokens", None

    def _usage(self, completion: Completion) -> MessageUsage:
        more: dict[str, Any] = {"loaded_tokens": completion.loaded_tokens}
        if self.keep.wanted:
            more["pinned_tokens"] = self.keep.pinned_tokens
            more["unpinned_tokens"] = self.keep.unpinned_tokens
        if self.retain is not None:
            more |= retained([self.retain])
        output = len(completion.choices[0].tokens) if self._answers else 0
        return split_usage(
            completion.prompt_tokens,
            completion.cached_tokens,
            self.keep.wanted,
            output=output,
            more=more,
        )


def _made(events: Iterable[Mapping[str, Any]]) -> Iterator[MessageEvent]:
    return (MessageEvent(**event) for event in events)


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
