"""`MessagesCall`: a request of the Messages API as a conversation of OpenAI's chat API."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Breakpoint", "MessagesCall", "marked"]

# A character of the private use area: no template treats it as space or markup.
_MARK = "\ue000"

Part = Literal["tool", "text", "call"]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A ``cache_control``: what comes before the end of its block is to stay for ``ttl_s`` seconds.

    ``part`` and ``index`` name the block in the translated conversation: the tool of this number,
    or a message. ``offset`` is the end of the block there: a number of characters of the message's
    content, or the number of the tool call.
    """

    ttl_s: int
    part: Part
    index: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesCall:
    """A request, translated.

    ``messages``, ``tools`` and ``tool_choice`` are OpenAI's; arguments of tool calls are JSON
    texts. ``breakpoints`` are in the order of the prompt. ``continued``: the last message is the
    beginning of the answer. ``max_tokens`` 0 asks for the prompt to be cached, without an answer.
    """

    model: str
    max_tokens: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any] | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    breakpoints: tuple[Breakpoint, ...] = ()
    continued: bool = False


def marked(
    call: MessagesCall, breakpoint: Breakpoint
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools that differ from the call's directly behind ``breakpoint``.

    So the renderings of both by a chat template have in common what ends with the block.
    Cost: a copy of one message or of the list of tools.
    """
    if breakpoint.part == "tool":
        tools = call.tools[: breakpoint.index + 1]
        if len(tools) == len(call.tools):
            other = deepcopy(tools[-1])
            other["function"]["name"] += _MARK
            tools = [*tools, other]
        return call.messages, tools
    messages = list(call.messages)
    message = messages[breakpoint.index] = deepcopy(messages[breakpoint.index])
    if breakpoint.part == "text":
        text, at = message["content"] or "", breakpoint.offset
        # Another first character behind the block, where there is one, than the one that follows.
        mark = _MARK if text[at : at + 1] != _MARK else "\ue001"
        message["content"] = text[:at] + mark + text[at:]
    else:
        function = message["tool_calls"][breakpoint.offset]["function"]
        function["arguments"] = _one_more(function["arguments"])
    return messages, call.tools


def _one_more(arguments: str) -> str:
    """Return a JSON object with one more entry at its end."""
    inside = arguments.strip()[1:-1].rstrip()
    return "{" + inside + (", " if inside else "") + f'"{_MARK}": 1' + "}"
