"""`Notifier`: calls the observers of requests, and keeps their faults from the requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.observe.usage.records import RequestEvent, RequestObserver

__all__ = ["Notifier"]

_log = logging.getLogger(__name__)


class Notifier:
    """Calls each of ``observers`` with each event, in order.

    An observer that raises is logged once per kind of event and error, counted in ``errors``, and
    called for the next event. Emitters check ``observers`` before they gather what an event needs.

    Thread safety: none; one thread emits.
    """

    def __init__(self, *observers: RequestObserver) -> None:
        self.observers = observers
        self.errors = 0
        self._logged: set[tuple[RequestObserver, type[RequestEvent], type[Exception]]] = set()

    def emit(self, event: RequestEvent) -> None:
        """Call all observers with ``event``."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer's fault must not hurt requests
                self._failed(observer, event, error)

    def _failed(self, observer: RequestObserver, event: RequestEvent, error: Exception) -> None:
        self.errors += 1
        kind = (observer, type(event), type(error))
        if kind not in self._logged:
            self._logged.add(kind)
            name = type(getattr(observer, "__self__", observer)).__name__
            _log.error("observer %s failed on %s", name, type(event).__name__, exc_info=error)
