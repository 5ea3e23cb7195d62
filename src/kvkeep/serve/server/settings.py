"""`ServerSettings`: the settings of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, key_in, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LOOPBACK_HOSTS", "ServerSettings"]

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of a server; those of the engine are `Limits`.

    ``name`` is the model's name for clients. ``api_key`` is required of every request but the
    health checks and the dashboard's files. A body has at most ``max_body_bytes`` and
    ``body_timeout_s`` to arrive; all bodies together have ``body_budget_bytes``, not counting the
    first 64 KiB of each. A request takes at most ``request_timeout_s``, from its head to its last
    byte. On shutdown, running requests have ``drain_timeout_s``, and then their KV
    ``flush_timeout_s`` to reach the engine's store, if it has one.

    ``hosts`` are the accepted names in the Host header (None: all). On a loopback address only its
    own names should be, or a web page could reach the server under its own name (DNS rebinding).

    ``weights`` are the shares of named tenants.

    Streams of ``/v1/messages`` that were silent for ``ping_s`` get a ping, so that proxies do not
    close them during long prefills.

    A step of the engine that takes longer than ``step_limit_s`` is reported as stuck by
    ``/livez`` and ``/ready``; it is not aborted.

    Without ``text``, no response under /kv contains text or tokens of prompts.
    """

    name: str
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 << 20
    body_budget_bytes: int = 256 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    flush_timeout_s: float = 10.0
    step_limit_s: float = 300.0
    hosts: frozenset[str] | None = LOOPBACK_HOSTS
    text: bool = True
    ping_s: float = 10.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidValue("the served model's name must not be empty")
        if self.api_key is not None:
            key_in("api_key", self.api_key)
        whole("max_body_bytes", self.max_body_bytes, 1)
        whole("body_budget_bytes", self.body_budget_bytes, self.max_body_bytes)
        for name in ("drain_timeout_s", "flush_timeout_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise InvalidValue(f"{name} must be a number of seconds, 0 or more; got {seconds}")
        for name in ("request_timeout_s", "body_timeout_s", "ping_s", "step_limit_s"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise InvalidValue(f"{name} must be a number of seconds above 0, got {seconds}")
