"""Anthropic's Messages API in terms of OpenAI's chat.

`read_call` translates a request, and `MessageEvents` writes an answer as a message or as events.
Nothing here waits, tokenizes or knows HTTP beyond status numbers. Values are plain JSON values.
"""

from kvkeep.serve.messages.answers import MessageEvents, new_id
from kvkeep.serve.messages.calls import Breakpoint, MessagesCall, marked
from kvkeep.serve.messages.checks import Refused, first_refused
from kvkeep.serve.messages.errors import error_body, error_event, kind_of
from kvkeep.serve.messages.requests import REFUSED, read_call
from kvkeep.serve.messages.usage import LONG_S, MessageUsage, split_usage

__all__ = [
    "LONG_S", "REFUSED", "Breakpoint", "MessageEvents", "MessageUsage", "MessagesCall", "Refused",
    "error_body", "error_event", "first_refused", "kind_of", "marked", "new_id", "read_call",
    "split_usage",
]  # fmt: skip
