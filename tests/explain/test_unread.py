"""Answers that were not stored because answers like them are never read again, explained."""

from __future__ import annotations

import time

from kvkeep.observe.explain.answer import Span
from kvkeep.observe.explain.explainer import missing
from kvkeep.observe.explain.sentences import sentence_of
from kvkeep.store.tiers import Miss


def test_a_miss_of_an_unread_answer_says_so() -> None:
    (found,) = missing([Miss(48, 96, "", "refused", time.time(), "unread")])
    assert (found.start, found.stop, found.reason) == (48, 96, "not_admitted")
    assert found.evidence == {"tier": None, "why": "unread"}
    span = Span(48, 96, None, found.reason, found.evidence)
    assert sentence_of([span], 96) == (
        "48 of 96 tokens computed: they are an answer, and answers like it were never read again"
    )
