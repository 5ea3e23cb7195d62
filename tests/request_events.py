"""Events of requests from a few plain values, for tests of what observes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.keys import Namespace
from kvkeep.observe.usage import (
    LoadReport,
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestBegun,
    RequestEnded,
    RequestLoaded,
    RequestOrigin,
    RequestRecord,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.observe.usage import Outcome, RequestObserver


class Requests:
    """Emits events to one observer, by the requests' ids."""

    def __init__(self, observer: RequestObserver) -> None:
        self.observer = observer
        self.models: dict[str, str] = {}

    def record(self, id: str, *, prompt: int = 1, namespace: str = "", kind: str = "",
               headers: Mapping[str, str] | None = None, session: str | None = None,
               ) -> RequestRecord:  # fmt: skip
        space = Namespace(tenant=namespace, model=self.models.get(id, ""))
        origin = RequestOrigin(id, kind, headers or {})
        return RequestRecord(origin, np.zeros(prompt, np.int32), space, session)

    def begun(self, id: str, *, kind: str, model: str, headers: Mapping[str, str]) -> None:
        self.models[id] = model
        self.observer(RequestBegun(self.record(id, kind=kind, headers=headers)))

    def admitted(self, id: str, *, namespace: str, prompt_tokens: int, cached_tokens: int,
                 match_s: float = 0.0, session: str | None = None,
                 ) -> None:  # fmt: skip
        record = self.record(id, prompt=prompt_tokens, namespace=namespace, session=session)
        self.observer(RequestAdmitted(record, 0, cached_tokens, match_s))

    def loaded(self, id: str, *, sources: Any, seconds: float, late: bool) -> None:
        report = LoadReport(tuple(sources), (), seconds, late)
        self.observer(RequestLoaded(self.record(id), report))

    def computed(self, id: str, *, tokens: int, seconds: float) -> None:
        self.observer(PromptComputed(self.record(id), tokens, seconds))

    def stored(self, id: str, *, tokens: int, seconds: float) -> None:
        self.observer(PromptStored(self.record(id), tokens, seconds))

    def ended(self, id: str, *, outcome: Outcome, generated: int, ttft_s: float | None) -> None:
        self.observer(RequestEnded(self.record(id), outcome, generated, ttft_s, 1.0))
