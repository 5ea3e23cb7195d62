"""The beginning of a request's conversation, in the form in which ``/tokenize`` takes it.

What is read here only decides where a request goes, so it may be less than the whole, and it is
never sent as the request: bodies are forwarded as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MOST_BYTES", "beginning", "beginning_of_text", "chat_of_messages", "chat_of_responses",
           "chat_turns", "tools_of"]  # fmt: skip

MOST_BYTES: Final = 512 << 10
"""Bytes of a conversation or text, as JSON, that are read: about 130,000 tokens of English."""

# A JSON string; without its last quote, as far as it is sound. So an escape is never cut in two.
_STRING: Final = (
    rb'"[^"\\]*+(?:\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})"
    rb'[^"\\]*+)*+("?)'
)
_string: Final = re.compile(_STRING)
_signs: Final = re.compile(_STRING + rb"|[\[\]{}:,]")
_last_character: Final = re.compile(rb"[\xc0-\xff][\x80-\xbf]*\Z")  # may be cut in two
_text: Final = msgspec.json.Decoder(str)

Chat = list[dict[str, Any]]


def beginning_of_text(value: bytes, start: int = 0) -> str:
    """Return the beginning of the JSON string at ``start``; raises msgspec's errors without one."""
    found = _string.match(value, start, start + MOST_BYTES)
    return _text.decode(value[start : start + 1] if found is None else _closed(found))


def _closed(string: re.Match[bytes]) -> bytes:
    """Return a string with its last quote."""
    if string[1]:
        return string[0]
    return _last_character.sub(b"", string[0]) + b'"'


def beginning(value: bytes) -> bytes:
    """Return the beginning of a JSON value as a JSON value: the text in which it is cut is closed.

    Cost: below 0.1 s, for many small parts, in which other threads run.
    """
    if len(value) <= MOST_BYTES:
        return value
    closing = bytearray()
    end, key = 0, False  # where the value may end; whether a string here is the name of a field
    for sign in _signs.finditer(value, 0, MOST_BYTES):
        at = sign.start()
        match value[at : at + 1]:
            case b'"':
                if not sign[1]:
                    if key:
                        break
                    return value[:at] + _closed(sign) + closing[::-1]
                continue
            case b"[" | b"{" as opened:
                closing += b"]" if opened == b"[" else b"}"
                end = at + 1
            case b"]" | b"}":
                del closing[-1:]
                end = at + 1
            case b",":
                end = at
        key = closing[-1:] == b"}" and value[at : at + 1] in {b"{", b","}
    return value[:end] + closing[::-1]


# --- conversations -----------------------------------------------------------------------------


def chat_turns(messages: object) -> Chat:
    """Return the first messages of a chat, up to the first with anything but text."""
    turns: Chat = []
    for message in _objects(messages):
        content = message.get("content")
        if not isinstance(message.get("role"), str) or (
            content is None and not message.get("tool_calls")
        ):
            break  # it is cut
        if not (content is None or isinstance(content, str)):
            parts = content if isinstance(content, list) else [None]
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                break
        turns.append(message)
    return turns


def chat_of_messages(system: object, messages: object) -> Chat:
    """Return the chat that a request of Anthropic's API begins with, as vLLM understands it."""
    turns: Chat = []
    text = _joined(system or "", "")
    if text is None:
        return turns
    if text:
        turns.append({"role": "system", "content": text})
    for message in _objects(messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            turns.append({"role": role, "content": content})
        elif not _add_blocks(role, content, turns):
            break
    return turns


def _add_blocks(role: object, blocks: object, turns: Chat) -> bool:
    """Add the turns of a message's blocks; return False at the first with anything but text."""
    texts, calls = [], []
    for block in _objects(blocks):
        match block.get("type"):
            case "text":
                texts.append({"type": "text", "text": block.get("text")})
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append(_call(block.get("id"), block.get("name"), arguments))
            case "tool_result":
                result = _joined(block.get("content") or "", "\n")
                if result is None:
                    return False
                turns.append(_result(block.get("tool_use_id"), result))
            case "thinking" | "redacted_thinking":
                pass
            case _:
                return False
    turn: dict[str, Any] = {"role": role, "content": texts or None}
    if len(texts) == 1:
        turn["content"] = texts[0]["text"]
    if calls:
        turn["tool_calls"] = calls
    if texts or calls:
        turns.append(turn)
    return True


def chat_of_responses(instructions: object, input: object) -> Chat:
    """Return the chat that a request of OpenAI's Responses API begins with."""
    turns: Chat = []
    if isinstance(instructions, str) and instructions:
        turns.append({"role": "system", "content": instructions})
    if isinstance(input, str):
        return [*turns, {"role": "user", "content": input}]
    for item in _objects(input):
        match item.get("type", "message"):
            case "message":
                text = _joined(item.get("content"), "\n")
                if text is None:
                    return turns
                turns.append({"role": item.get("role"), "content": text})
            case "function_call":
                call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": None})
                turns[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output" if isinstance(item.get("output"), str):
                turns.append(_result(item.get("call_id"), item["output"]))
            case _:
                return turns
    return turns


def tools_of(tools: object) -> list[dict[str, Any]]:
    """Return definitions of tools in the form of the chat API; raises `InvalidValue` for others."""
    made = []
    for tool in _objects(tools):
        if "name" not in tool:
            raise InvalidValue("only functions are tools of a chat")
        function: dict[str, Any] = {
            name: tool[name] for name in ("name", "description") if name in tool
        }
        function["parameters"] = tool.get("input_schema", tool.get("parameters", {}))
        made.append({"type": "function", "function": function})
    return made


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects that a list begins with."""
    for item in value if isinstance(value, list) else ():
        if not isinstance(item, dict):
            return
        yield item


def _joined(content: object, between: str) -> str | None:
    """Return a text, or that of a list of texts; None for anything else."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else (None,):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return between.join(texts)


def _call(id: object, name: object, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def _result(id: object, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}
