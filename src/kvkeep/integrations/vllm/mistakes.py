"""`RequestMistakes`: wrong ``kv_transfer_params`` are ignored, counted, and logged once."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.options import RequestOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["RequestMistakes"]

_LOG = logging.getLogger("kvkeep.vllm")
_SPAN_S: Final = 3600.0
MOST: Final = 32
"""Mistakes that are logged in an hour."""


class RequestMistakes:
    """Reads the options of requests, whose mistakes never fail a request.

    Each mistake is counted as ``ignored_params``. It is logged if it is the first of its kind in
    this hour, and at most `MOST` are: a client may make up new ones with every request.

    Thread safety: none; it belongs to the scheduler's thread. Memory: `MOST` messages.

    Arguments:
        counts: where they are counted.
        clock: returns seconds.
    """

    def __init__(self, counts: Counts, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._clock = clock
        self._began = clock()
        self._logged: set[str] = set()
        self._full = False

    def options(self, request: str, params: object) -> RequestOptions:
        """Return the options in the ``kv_transfer_params`` of ``request``; the defaults if wrong.

        Cost: a microsecond.
        """
        try:
            return RequestOptions.parse(params)
        except InvalidValue as error:
            self._counts.add(ignored_params=1)
            self._log(request, f"{error}"[:500])
            return RequestOptions()

    def _log(self, request: str, mistake: str) -> None:
        if self._clock() >= self._began + _SPAN_S:
            self._began, self._full = self._clock(), False
            self._logged.clear()
        if mistake in self._logged or self._full:
            return
        if len(self._logged) == MOST:
            self._full = True
            _LOG.warning(
                "%d different mistakes in kv_transfer_params were logged in this hour; more are "
                "only counted (vllm:kvkeep_ignored_params)", MOST,
            )  # fmt: skip
            return
        self._logged.add(mistake)
        _LOG.warning(
            "kv_transfer_params of request %.100r: all of kvkeep's are ignored: %s (the same "
            "mistake is not logged again for an hour, and counted as ignored_params)",
            request, mistake,
        )  # fmt: skip
