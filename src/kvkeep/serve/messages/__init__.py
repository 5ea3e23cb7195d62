"""Anthropic's Messages API in terms of OpenAI's chat.

`read_call` translates a request, and `MessageEvents` writes an answer as a message or as events.
Nothing here waits, tokenizes or knows HTTP beyond status numbers. Values are plain JSON values.
"""

from kvkeep.serve.messages.answers import (
    LONG_S,
    MessageEvents,
    MessageUsage,
    error_body,
    error_event,
    kind_of,
    new_id,
    split_usage,
)
from kvkeep.serve.messages.requests import (
    REFUSED,
    Breakpoint,
    MessagesCall,
    Refused,
    first_refused,
    marked,
    read_call,
)

__all__ = [
    "LONG_S", "REFUSED", "Breakpoint", "MessageEvents", "MessageUsage", "MessagesCall", "Refused",
    "error_body", "error_event", "first_refused", "kind_of", "marked", "new_id", "read_call",
    "split_usage",
]  # fmt: skip
