"""What a server says of its memory: how much it may use, and what it does when that is full."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvkeep.store.backends.valkey.wire import Answer, Garbled

__all__ = ["ServerMemory", "read_memory"]


class ServerMemory(NamedTuple):
    """The memory of the server ``node``.

    Attributes:
        node: ``host:port``.
        used: bytes that it uses.
        limit: its ``maxmemory`` in bytes; 0: none.
        policy: its ``maxmemory-policy``.
    """

    node: str
    used: int
    limit: int
    policy: str


def read_memory(answer: Answer, node: str) -> ServerMemory:
    """Read the answer to ``INFO memory``. Raises `Garbled` if it lacks a field."""
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else ""
    fields = dict(re.findall(r"^(\w+):(\S*)\r?$", text, re.MULTILINE))
    try:
        return ServerMemory(
            node, int(fields["used_memory"]), int(fields["maxmemory"]), fields["maxmemory_policy"]
        )
    except (KeyError, ValueError) as error:
        raise Garbled("the server does not tell its memory") from error
