"""Answers of an OpenAI-compatible server, whole or streamed, in the form of the Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.serve.messages.answers import MessageEvents, new_id
from kvkeep.serve.messages.usage import MessageUsage, split_usage

if TYPE_CHECKING:
    from kvkeep.serve.messages.calls import MessagesCall

__all__ = ["ChatStream", "from_chat", "stop_of"]

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def stop_of(
    finish_reason: str | None, matched: object, call: MessagesCall
) -> tuple[str, str | None]:
    """Return ``stop_reason`` and ``stop_sequence`` of an answer.

    ``matched`` is vLLM's ``stop_reason``: the stop text that ended the answer, if one did.
    """
    if finish_reason == "stop" and isinstance(matched, str) and matched in call.stop:
        return "stop_sequence", matched
    return _STOPS.get(finish_reason or "", "end_turn"), None


def from_chat(answer: dict[str, Any], call: MessagesCall) -> dict[str, Any]:
    """Return the message for a whole answer of ``/v1/chat/completions``."""
    stream = ChatStream(call)
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    choice = first if isinstance(first, dict) else {}
    message = choice.get("message")
    stream.feed({**answer, "choices": [{**choice, "index": 0, "delta": message}]})
    stream.end()
    return stream.message


class ChatStream:
    """Translates the chunks of a streamed chat answer into events.

    Fields of the wrong kind are read as absent: the server behind may be any. Thread safety: none.
    """

    def __init__(self, call: MessagesCall) -> None:
        self._call = call
        self._events: MessageEvents | None = None
        self._finish: str | None = None
        self._matched: object = None
        self._usage: dict[str, Any] = {}

    @property
    def begun(self) -> bool:
        """Whether any event was returned."""
        return self._events is not None

    @property
    def finished(self) -> bool:
        """Whether a finish reason came: what ends without one was broken off."""
        return self._finish is not None

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer, after `end`."""
        assert self._events is not None
        return self._events.message

    @property
    def usage(self) -> MessageUsage:
        """The token counts known so far."""
        prompt, output = (
            _count(self._usage, "prompt_tokens"),
            _count(self._usage, "completion_tokens"),
        )
        details = self._usage.get("prompt_tokens_details")
        cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
        if self._call.max_tokens == 0:
            output = 0
        # Where a breakpoint lies is known without a tokenizer only at the prompt's end.
        last = self._call.breakpoints[-1] if self._call.last_is_breakpoint else None
        points = [] if last is None else [(prompt, float(last.ttl_s))]
        own = self._usage.get("kvkeep")
        return split_usage(
            prompt,
            min(cached, prompt),
            points,
            output=output,
            more=own if isinstance(own, dict) else None,
        )

    def feed(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of one chunk."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        events = self._begin(chunk)
        for choice in _dicts(chunk.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict) and self._call.max_tokens:
                events += self._delta(delta)
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                self._finish, self._matched = reason, choice.get("stop_reason")
        return events

    def end(self) -> list[dict[str, Any]]:
        """Return the last events."""
        events = self._begin({})
        assert self._events is not None
        reason, matched = stop_of(self._finish, self._matched, self._call)
        if self._events.has_calls and reason == "end_turn":
            reason = "tool_use"
        if not self._call.max_tokens:
            reason, matched = "max_tokens", None
        return events + self._events.end(reason, matched, self.usage)

    def _begin(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        if self._events is not None:
            return []
        model = chunk.get("model")
        self._events = MessageEvents(
            new_id(), model if isinstance(model, str) else self._call.model
        )
        return self._events.start(self.usage)

    def _delta(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        writer = self._events
        assert writer is not None
        text = delta.get("content")
        events = writer.text(text) if isinstance(text, str) else []
        for number, tool in enumerate(_dicts(delta.get("tool_calls"))):
            function = tool.get("function")
            function = function if isinstance(function, dict) else {}
            key = tool.get("index", number)
            name, id = function.get("name"), tool.get("id")
            if isinstance(name, str) and name and not writer.is_in(key):
                events += writer.call(key, id if isinstance(id, str) else None, name)
            arguments = function.get("arguments")
            if isinstance(arguments, str) and writer.is_in(key):
                events += writer.arguments(arguments)
        return events


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
