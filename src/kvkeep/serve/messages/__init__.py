"""Anthropic's Messages API in terms of OpenAI's chat: pure functions for server and router.

`read_call` translates a request, `MessageEvents` writes answers as a message or as events, and
`from_chat` and `ChatStream` translate answers of an OpenAI-compatible server. Nothing here waits,
tokenizes or knows HTTP beyond status numbers. Values are plain JSON values.
"""

from kvkeep.serve.messages.answers import MessageEvents, new_id
from kvkeep.serve.messages.calls import Breakpoint, MessagesCall, chat_body, marked
from kvkeep.serve.messages.chat_answers import ChatStream, from_chat, stop_of
from kvkeep.serve.messages.checks import Refused, first_refused
from kvkeep.serve.messages.errors import error_body, error_event, kind_of, message_of
from kvkeep.serve.messages.requests import REFUSED, read_call
from kvkeep.serve.messages.usage import LONG_S, MessageUsage, split_usage

__all__ = [
    "LONG_S", "REFUSED", "Breakpoint", "ChatStream", "MessageEvents", "MessageUsage",
    "MessagesCall", "Refused", "chat_body", "error_body", "error_event", "first_refused",
    "from_chat", "kind_of", "marked", "message_of",
    "new_id", "read_call", "split_usage", "stop_of",
]  # fmt: skip
