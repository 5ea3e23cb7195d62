"""`StatusSource`: what the endpoints that only tell are answered from.

The server's own `Service` is one. A cache inside another engine is one, too, and
`kvkeep.serve.server.status_app` serves it, so that ``kvkeep top``, ``kvkeep explain`` and the
dashboard see both alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.observe.explain import Explainer
    from kvkeep.serve.server.engine_costs import EngineCosts
    from kvkeep.serve.server.live import Live
    from kvkeep.serve.server.schemas.kv import KVStats
    from kvkeep.serve.server.tenant_usage import UsagePart
    from kvkeep.serve.server.thread_pools import ThreadPools

__all__ = ["OutsideSource", "StatusSource"]


class StatusSource(Protocol):
    """Answers ``/kv/live``, ``/kv/requests``, ``/kv/explain/ID``, ``/kv/summary``, ``/kv/cost`` and
    ``/kv/usage``.

    Thread safety: for the event loop; `usage` and the explainer's methods for any thread.
    """

    live: Live
    threads: ThreadPools
    costs: EngineCosts

    @property
    def explainer(self) -> Explainer | None:
        """What explains requests; None: they are not explained."""

    @property
    def unexplained(self) -> str:
        """Why requests are not explained, if they are not."""

    @property
    def decode(self) -> Callable[[Sequence[int]], str] | None:
        """What makes text of tokens; None: answers have no text and no tokens of prompts."""

    def usage(self, part: UsagePart) -> dict[str, Any]:
        """Return what tenants used. Cost: a pass over namespaces and tenants."""


class OutsideSource(StatusSource, Protocol):
    """The cache of an engine that is not kvkeep's."""

    @property
    def engine(self) -> str:
        """The name of the engine, for messages."""

    def stats(self) -> KVStats:
        """Return all counters. Cost: a call of each tier's, without I/O. Any thread."""

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads. Any thread."""

    def close(self) -> None:
        """End the threads of `live` and `threads`."""
