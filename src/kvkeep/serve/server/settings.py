"""`ServerSettings`: what a server is told when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvkeep.core.errors import InvalidValue, whole

__all__ = ["LOOPBACK_HOSTS", "ServerSettings"]

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server is told when it is made; the engine has its own `Limits`.

    ``name`` is what clients call the model. ``api_key`` is asked of every request but /health.
    A body has at most ``max_body_bytes`` and arrives within ``body_timeout_s``; those of all
    requests have ``body_budget_bytes`` together, the first 64 KiB of each not counted. Prompts have
    at most ``max_prompt_tokens`` (None: what the model and the pool take). A request takes
    ``request_timeout_s`` seconds at most, from its head to its last byte; at the end of the service
    those that run have ``drain_timeout_s`` seconds more, and what they computed has
    ``flush_timeout_s`` to reach the engine's store, if it has one.
    ``draft_tokens`` are guessed for requests that do not say. ``hosts`` are the names in a Host
    header that are served (None: all): on a loopback address, only its own names, or a page in a
    browser could reach the server under a name of its own (DNS rebinding).
    Without ``text`` no answer under /kv has any of a prompt's text or tokens; without ``explain``
    nobody remembers prompts to explain what was reused of them; without ``answers`` the engine's
    store is given the KV of prompts alone, whatever a request says.
    """

    name: str
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 << 20
    body_budget_bytes: int = 256 << 20
    body_timeout_s: float = 60.0
    max_prompt_tokens: int | None = None
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    flush_timeout_s: float = 10.0
    draft_tokens: int = 0
    hosts: frozenset[str] | None = LOOPBACK_HOSTS
    text: bool = True
    explain: bool = True
    answers: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidValue("a served model has a name, got an empty one")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidValue("an API key is printable ASCII: it travels in a header")
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidValue("an API key is not empty; leave it out for a server without one")
        whole("max_body_bytes", self.max_body_bytes, 1)
        whole("body_budget_bytes", self.body_budget_bytes, self.max_body_bytes)
        whole("draft_tokens", self.draft_tokens, 0)
        if self.max_prompt_tokens is not None:
            whole("max_prompt_tokens", self.max_prompt_tokens, 1)
        for name in ("request_timeout_s", "drain_timeout_s", "flush_timeout_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise InvalidValue(f"{name} is a number of seconds, 0 or more; got {seconds}")
        if not 0 < self.body_timeout_s < math.inf:
            raise InvalidValue(
                f"body_timeout_s is a number of seconds above 0, got {self.body_timeout_s}"
            )
