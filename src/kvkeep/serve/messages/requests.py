"""`read_call`: checks a request of the Messages API and translates it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.core.errors import InvalidValue, did_you_mean, told

__all__ = [
    "REFUSED",
    "Breakpoint",
    "MessagesCall",
    "Refused",
    "first_refused",
    "marked",
    "read_call",
]


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


_ONLY_TEXT = "models here read and write text only"
_INT32 = 2**31 - 1

Refused = Mapping[str, tuple[Any, ...]]
"""Fields that are understood and cannot be honoured: why, and then the values that ask for nothing.

Null asks for nothing in every field.
"""


def first_refused(fields: Mapping[str, Any], refused: Refused) -> tuple[str, str] | None:
    """Return name and reason of the first field whose value asks for what cannot be honoured."""
    for name, (why, *neutral) in refused.items():
        value = fields.get(name)
        if value is not None and not any(_equal(value, item) for item in neutral):
            return name, f"cannot be honoured: {why}"
    return None


def _equal(value: object, neutral: object) -> bool:
    """Whether two JSON values are equal; unlike Python's 1 and True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def blocks_at(place: str, value: object) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks of a content, each with its place; a text is one block."""
    if isinstance(value, str):
        if not value:
            raise InvalidValue(f"{place}: should have at least one character")
        return [(place, {"type": "text", "text": value})]
    if not isinstance(value, list):
        raise InvalidValue(f"{place}: should be a text or a list of blocks, got {told(value)}")
    found = []
    for number, block in enumerate(value):
        where = f"{place}.{number}"
        found.append((where, object_at(where, block)))
    return found


def kind_of_block(place: str, block: dict[str, Any], allowed: set[str]) -> str:
    """Return the type of a block; one of ``allowed``."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in allowed:
        what = f"; {_ONLY_TEXT}" if kind in {"image", "document"} else ""
        raise InvalidValue(
            f"{place}.type: should be one of {', '.join(sorted(allowed))} here, got {told(kind)}"
            f"{what}"
        )
    return kind


def object_at(place: str, value: object) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise InvalidValue(f"{place}: should be a JSON object, got {told(value)}")
    return value


def list_at(place: str, value: object, most: int) -> list[Any]:
    """Return a list of at most ``most`` entries; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidValue(f"{place}: should be a list, got {told(value)}")
    if len(value) > most:
        raise InvalidValue(f"{place}: has {len(value):,} entries; at most {most:,}")
    return value


def text_at(place: str, value: object, *, empty: bool = False) -> str:
    """Return a text, which must not be empty unless ``empty`` is given."""
    if not isinstance(value, str) or not (value or empty):
        raise InvalidValue(f"{place}: should be a text, got {told(value)}")
    return value


def flag_at(place: str, value: object) -> bool:
    """Return a truth value; null is false."""
    if value is not None and not isinstance(value, bool):
        raise InvalidValue(f"{place}: should be true or false, got {told(value)}")
    return bool(value)


def whole_at(place: str, value: object) -> int:
    """Return a whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT32:
        raise InvalidValue(f"{place}: should be a whole number, 0 or more, got {told(value)}")
    return value


def share_at(place: str, value: object) -> float | None:
    """Return a number in 0 … 1; null is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidValue(f"{place}: should be in 0 … 1, got {told(value)}")
    return float(value)


MOST_BREAKPOINTS = 4
_TTL_S = {"5m": 300, "1h": 3600}
_MOST_MESSAGES = 4096
_MOST_BLOCKS = 8192
_MOST_TOOLS = 1024
_MOST_STOPS = 16
_LONGEST_STOP = 256  # characters
_NO_THINKING = "models here have no thinking that can be set; leave it out"
_ADAPTIVE = {"type": "adaptive"}  # a model without thinking adapts by not thinking
REFUSED: Refused = {
    "container": ("this server runs no code",),
    "mcp_servers": ("this server calls no tools by itself", []),
    "context_management": (
        "this server edits no conversation",
        {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    # "high" is Anthropic's default, the same as no effort at all.
    "output_config": ("answers have no other format or effort", {}, {"effort": "high"}),
    "service_tier": ("this server treats all requests alike", "auto", "standard_only"),
    "speed": ("this server has one speed", "standard"),
    "inference_geo": ("this server is where it is",),
    "diagnostics": ("ask /kv/explain instead",),
    "thinking": (
        _NO_THINKING,
        {"type": "disabled"}, _ADAPTIVE,
        {**_ADAPTIVE, "display": "summarized"}, {**_ADAPTIVE, "display": "omitted"},
    ),
}  # fmt: skip
_KNOWN = {
    "model", "max_tokens", "messages", "system", "tools", "tool_choice", "stop_sequences",
    "temperature", "top_p", "top_k", "stream", "cache_control", "metadata",
}  # fmt: skip


def read_call(body: object, *, more: frozenset[str] = frozenset()) -> MessagesCall:
    """Return the request in a JSON value. ``more`` are the caller's own fields, left alone here.

    Raises `InvalidValue`, whose message begins with the place of the wrong value, as Anthropic's
    do: ``messages.0.content: …``.
    """
    if not isinstance(body, dict):
        raise InvalidValue(f"the body should be a JSON object, got {told(body)}")
    refused = first_refused(body, REFUSED)
    if refused is not None:
        raise InvalidValue(": ".join(refused))
    for name, value in body.items():
        if value is not None and name not in _KNOWN and name not in REFUSED and name not in more:
            near = did_you_mean(str(name), (*_KNOWN, *REFUSED, *more))
            raise InvalidValue(
                f"{told(name)}: is no field of this request{near or '; leave it out'}"
            )
    turns = _Turns()
    tools = _tools(body.get("tools"), turns)
    _system(body.get("system"), turns)
    _messages(body.get("messages"), turns)
    turns.mark_last(_ttl("cache_control", body.get("cache_control")))
    turns.check_breakpoints()
    choice = _tool_choice(body.get("tool_choice"), tools)
    messages = turns.joined()
    last = messages[-1]
    if last.get("tool_calls"):
        raise InvalidValue(
            "messages: `tool_use` blocks at the end need their `tool_result` blocks in a user "
            "message behind them"
        )
    return MessagesCall(
        model=text_at("model", body.get("model")),
        max_tokens=whole_at("max_tokens", body.get("max_tokens")),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        stop=_stops(body.get("stop_sequences")),
        temperature=share_at("temperature", body.get("temperature")),
        top_p=share_at("top_p", body.get("top_p")),
        top_k=None if body.get("top_k") is None else whole_at("top_k", body["top_k"]),
        stream=flag_at("stream", body.get("stream")),
        breakpoints=tuple(turns.breakpoints),
        continued=last["role"] == "assistant",
    )


class _Turns:
    """The conversation as it is translated, and its breakpoints.

    The texts of a message are joined once, by `joined`: joined one by one, thousands of blocks
    would cost the square of their size.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of each message
        self._size = 0  # characters of the last message's content, with its line breaks
        self.breakpoints: list[Breakpoint] = []
        self.places: list[str] = []
        self.calls: set[str] = set()  # ids of the tool calls of the last turn of the assistant
        self.answered: set[str] = set()
        self._end: tuple[Part, int, int] | None = None  # of the last block

    def text(self, role: str, text: str) -> None:
        """Add text of a role; consecutive texts of a role are one turn, in lines of their own."""
        self._begin(role)
        self._add(text)

    def call(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant."""
        self._begin("assistant")
        calls = self.messages[-1].setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": id, "type": "function", "function": function})
        self._end = ("call", len(self.messages) - 1, len(calls) - 1)

    def result(self, id: str, text: str) -> None:
        """Add the result of a tool call."""
        self._begin("tool", tool_call_id=id)
        self._add(text)

    def _begin(self, role: str, **fields: str) -> None:
        """Begin a message, unless the last one is of the same role; each result is one."""
        if not self.messages or fields or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": None, **fields})
            self._texts.append([])
            self._size = 0

    def _add(self, text: str) -> None:
        texts = self._texts[-1]
        self._size += len(text) + bool(texts)
        texts.append(text)
        self._end = ("text", len(self.messages) - 1, self._size)

    def joined(self) -> list[dict[str, Any]]:
        """Return the messages, each with its content: a text, or None for tool calls alone."""
        return [
            {**message, "content": "\n".join(texts) if texts else None}
            for message, texts in zip(self.messages, self._texts, strict=True)
        ]

    def tool(self, number: int) -> None:
        """Note the definition of a tool."""
        self._end = ("tool", number, 0)

    def mark(self, ttl_s: int | None, place: str) -> None:
        """Set a breakpoint at the end of the last block, if it has a time to live."""
        if ttl_s is not None and self._end is not None:
            part, index, offset = self._end
            self.breakpoints.append(Breakpoint(ttl_s, part, index, offset))
            self.places.append(place)

    def mark_last(self, ttl_s: int | None) -> None:
        """Set the breakpoint that a request asks for at its end, unless the last block has one."""
        last = self.breakpoints[-1] if self.breakpoints else None
        if last is None or (last.part, last.index, last.offset) != self._end:
            self.mark(ttl_s, "cache_control")

    def check_breakpoints(self) -> None:
        """Refuse too many breakpoints, and a long time to live behind a short one."""
        if len(self.breakpoints) > MOST_BREAKPOINTS:
            raise InvalidValue(
                f"A maximum of {MOST_BREAKPOINTS} blocks with cache_control may be provided. "
                f"Found {len(self.breakpoints)}."
            )
        shortest = max(_TTL_S.values())
        for one, place in zip(self.breakpoints, self.places, strict=True):
            if one.ttl_s > shortest:
                raise InvalidValue(
                    f"{place}.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
                    "cache_control block; blocks are processed in the order tools, system, messages"
                )
            shortest = min(shortest, one.ttl_s)


# --- parts of the body -------------------------------------------------------------------------


def _tools(value: object, turns: _Turns) -> list[dict[str, Any]]:
    tools = []
    for number, tool in enumerate(list_at("tools", value, _MOST_TOOLS)):
        place = f"tools.{number}"
        fields = object_at(place, tool)
        if fields.get("type") not in {None, "custom"}:
            raise InvalidValue(
                f"{place}.type: {told(fields['type'])} is a tool that Anthropic runs or defines; "
                "only tools with a name and an input_schema can be used here"
            )
        function = {
            "name": text_at(f"{place}.name", fields.get("name")),
            "parameters": object_at(f"{place}.input_schema", fields.get("input_schema")),
        }
        if fields.get("description") is not None:
            function["description"] = text_at(f"{place}.description", fields["description"])
        tools.append({"type": "function", "function": function})
        turns.tool(number)
        turns.mark(_ttl(f"{place}.cache_control", fields.get("cache_control")), place)
    return tools


def _system(value: object, turns: _Turns) -> None:
    if value is None or value == "":
        return
    for place, block in blocks_at("system", value):
        kind_of_block(place, block, {"text"})
        _add_text(place, block, "system", turns)


def _messages(value: object, turns: _Turns) -> None:
    messages = list_at("messages", value, _MOST_MESSAGES)
    if not messages:
        raise InvalidValue("messages: at least one message is required")
    seen = 0
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        fields = object_at(place, message)
        role = fields.get("role")
        if role not in {"user", "assistant", "system"}:
            raise InvalidValue(
                f"{place}.role: should be 'user', 'assistant' or 'system', got {told(role)}"
            )
        blocks = blocks_at(f"{place}.content", fields.get("content"))
        seen += len(blocks)
        if seen > _MOST_BLOCKS:
            raise InvalidValue(f"messages: have more than {_MOST_BLOCKS:,} blocks")
        if role == "assistant":
            _assistant(blocks, turns)
        else:
            _user(place, blocks, role, turns)
    if not turns.messages or all(turn["role"] == "system" for turn in turns.messages):
        raise InvalidValue("messages: at least one message with content is required")


def _assistant(blocks: list[tuple[str, dict[str, Any]]], turns: _Turns) -> None:
    if turns.messages and turns.messages[-1]["role"] != "assistant":
        turns.calls = set()
    for place, block in blocks:
        kind = kind_of_block(place, block, {"text", "tool_use", "thinking", "redacted_thinking"})
        if kind == "text":
            _add_text(place, block, "assistant", turns)
        elif kind == "tool_use":
            id = text_at(f"{place}.id", block.get("id"))
            arguments = json.dumps(
                object_at(f"{place}.input", block.get("input")), ensure_ascii=False
            )
            turns.call(id, text_at(f"{place}.name", block.get("name")), arguments)
            turns.calls.add(id)
            turns.mark(_ttl(f"{place}.cache_control", block.get("cache_control")), place)
        # Thinking is not part of later prompts.
    turns.answered = set()


def _user(message: str, blocks: list[tuple[str, dict[str, Any]]], role: str, turns: _Turns) -> None:
    allowed = {"text", "tool_result"} if role == "user" else {"text"}
    for place, block in blocks:
        if kind_of_block(place, block, allowed) == "text":
            _add_text(place, block, role, turns)
            continue
        id = text_at(f"{place}.tool_use_id", block.get("tool_use_id"))
        if id not in turns.calls:
            raise InvalidValue(
                f"{place}: unexpected `tool_use_id` found in `tool_result` blocks: {told(id)}. "
                "Each `tool_result` block must have a corresponding `tool_use` block in the "
                "previous message."
            )
        flag_at(f"{place}.is_error", block.get("is_error"))
        turns.answered.add(id)
        turns.result(id, _result(f"{place}.content", block.get("content")))
        turns.mark(_ttl(f"{place}.cache_control", block.get("cache_control")), place)
    if role == "user" and turns.calls - turns.answered:
        missing = ", ".join(sorted(turns.calls - turns.answered))
        raise InvalidValue(
            f"{message}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {missing}. Each `tool_use` block must have a corresponding `tool_result` "
            "block in the next message."
        )
    if role == "user":
        turns.calls = set()


def _result(place: str, value: object) -> str:
    if value is None:
        return ""
    texts = []
    for where, block in blocks_at(place, value):
        kind_of_block(where, block, {"text"})
        texts.append(text_at(f"{where}.text", block.get("text"), empty=True))
    return "\n".join(texts)


def _add_text(place: str, block: dict[str, Any], role: str, turns: _Turns) -> None:
    text = text_at(f"{place}.text", block.get("text"), empty=True)
    if not text:
        raise InvalidValue(f"{place}: text content blocks must be non-empty")
    turns.text(role, text)
    turns.mark(_ttl(f"{place}.cache_control", block.get("cache_control")), place)


def _tool_choice(value: object, tools: list[dict[str, Any]]) -> str | dict[str, Any] | None:
    """Return OpenAI's tool_choice."""
    if value is None:
        return None
    fields = object_at("tool_choice", value)
    kind = fields.get("type")
    flag_at("tool_choice.disable_parallel_tool_use", fields.get("disable_parallel_tool_use"))
    if kind == "none":
        return "none"
    if kind not in {"auto", "any", "tool"}:
        raise InvalidValue(
            f"tool_choice.type: should be 'auto', 'any', 'tool' or 'none', got {told(kind)}"
        )
    if not tools and kind == "auto":
        return None
    if not tools:
        raise InvalidValue("tool_choice: needs tools; leave it out, or set it to auto or none")
    if kind != "tool":
        return "auto" if kind == "auto" else "required"
    name = text_at("tool_choice.name", fields.get("name"))
    if name not in {tool["function"]["name"] for tool in tools}:
        raise InvalidValue(f"tool_choice.name: {told(name)} is none of the tools")
    return {"type": "function", "function": {"name": name}}


def _stops(value: object) -> tuple[str, ...]:
    stops = list_at("stop_sequences", value, _MOST_STOPS)
    for number, stop in enumerate(stops):
        text = text_at(f"stop_sequences.{number}", stop)
        if not text.strip():
            raise InvalidValue("stop_sequences: each stop sequence must contain non-whitespace")
        if len(text) > _LONGEST_STOP:
            raise InvalidValue(
                f"stop_sequences.{number}: has {len(text)} characters; at most {_LONGEST_STOP}"
            )
    return tuple(stops)


def _ttl(place: str, value: object) -> int | None:
    """Return the seconds of a ``cache_control``; None for none."""
    if value is None:
        return None
    fields = object_at(place, value)
    if fields.get("type") != "ephemeral" or fields.keys() - {"type", "ttl"}:
        raise InvalidValue(
            f"{place}: should be {{'type': 'ephemeral'}}, with a ttl of '5m' or '1h' if any; got "
            f"{told(value)}"
        )
    ttl = fields.get("ttl")
    if ttl is None:
        return _TTL_S["5m"]
    if not isinstance(ttl, str) or ttl not in _TTL_S:
        raise InvalidValue(f"{place}.ttl: should be '5m' or '1h', got {told(ttl)}")
    return _TTL_S[ttl]
