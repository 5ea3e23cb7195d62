"""`Watcher`: polls a running server for ``kvkeep top``."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.client import Gone, ServerRefusal
from kvkeep.cli.replies import entries, whole
from kvkeep.cli.server import path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.cli.client import Client

__all__ = ["Picture", "Watcher"]

_SUMMARY_S: Final = 5.0  # the server reads 1,000 requests for a summary: not at every poll


@dataclass(frozen=True, slots=True)
class Picture:
    """The state of a server at one time.

    ``live`` is the latest answer of /kv/live and ``before`` the one before it (None at first, and
    after a restart of the server). ``requests`` and ``summary`` are None if the server does not
    explain. ``seen_at`` is the time of these answers, in Unix seconds. ``trouble``
    is why a later poll failed; None if the latest succeeded.
    """

    live: Mapping[str, Any]
    before: Mapping[str, Any] | None
    requests: Sequence[Mapping[str, Any]] | None
    summary: Mapping[str, Any] | None
    seen_at: float
    trouble: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the server's answers for JSON, or only the error if the poll failed."""
        if self.trouble is not None:
            return {"at": time.time(), "error": self.trouble}
        live, requests, summary = self.live, self.requests, self.summary
        return {"at": self.seen_at, "live": live, "requests": requests, "summary": summary}


class Watcher:
    """Polls one server for a `Picture`. Not thread-safe."""

    def __init__(self, client: Client, *, last: int = 50) -> None:
        self._client = client
        self._last = last
        self._picture: Picture | None = None
        self._summary: Mapping[str, Any] | None = None
        self._summary_at = -math.inf

    def poll(self) -> Picture:
        """Poll once; if the server cannot be reached, return the last picture with its trouble.

        Raises `Gone` if there is no picture yet, and `ServerRefusal` where polling again would not
        help: the API key is wrong, or this is not a kvkeep server.
        """
        try:
            self._picture = self._ask()
        except Gone as error:
            old = self._picture
            if old is None:
                raise
            self._picture = Picture(
                old.live, None, old.requests, old.summary, old.seen_at, str(error)
            )
            self._summary_at = -math.inf  # after a restart there may be another, or none
        return self._picture

    def _ask(self) -> Picture:
        live = self._client.get("/kv/live")
        requests = self._explained(path("/kv/requests", last=self._last))
        if time.monotonic() - self._summary_at >= _SUMMARY_S:
            self._summary = self._explained("/kv/summary")
            self._summary_at = time.monotonic()
        before = None if self._picture is None else self._picture.live
        if before is not None and whole(live, "uptime_s") < whole(before, "uptime_s"):
            before = None
        return Picture(
            live=live,
            before=before,
            requests=None if requests is None else entries(requests, "requests"),
            summary=self._summary,
            seen_at=time.time(),
        )

    def _explained(self, path: str) -> Mapping[str, Any] | None:
        """Get ``path``, which exists only while the server explains; None if it does not."""
        try:
            return self._client.get(path)
        except ServerRefusal as error:
            if error.status == 404:
                return None
            raise
