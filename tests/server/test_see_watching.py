"""What the server's observer makes of what engine and store tell."""

from __future__ import annotations

import pytest
from see_help import COMPLETIONS, ask, tokens_of

from kvkeep.core.events import PrefixMiss
from kvkeep.core.keys import Namespace
from kvkeep.observe.explain import Explainer
from kvkeep.observe.usage import LoadReport, PromptComputed, RequestAdmitted, RequestBegun
from kvkeep.store import Miss

# What a store says, and the reason and evidence that it is.
SAID = [
    ("evicted", "lru", "evicted", {"cause": "pressure", "policy": "lru"}),
    ("removed", "cleared", "evicted", {"cause": "cleared", "policy": None}),
    ("removed", "removed", "evicted", {"cause": "asked", "policy": None}),
    ("removed", "ttl", "evicted", {"cause": "ttl", "policy": None}),
    ("removed", "gone", "evicted", {"cause": "gone", "policy": None}),
    ("dropped", "queue full", "not_admitted", {"why": "queue_full"}),
    ("dropped", "no time", "not_admitted", {"why": "queue_full"}),
    ("dropped", "no room: 5 MiB are needed", "not_admitted", {"why": "no_room"}),
    ("dropped", "write failed: on fire", "not_admitted", {"why": "write_failed"}),
    ("dropped", "breaker", "not_admitted", {"why": "breaker"}),
    ("refused", "admission", "not_admitted", {"why": "admission"}),
    ("refused", "unread", "not_admitted", {"why": "unread"}),
    ("refused", "version: 9", "not_admitted", {"why": "unknown"}),
    ("damaged", "checksum", "damaged", {}),
    ("unavailable", "breaker", "tier_unavailable", {"why": "breaker", "waited_s": 0.5}),
    ("unavailable", "refused: errno 111", "tier_unavailable", {"why": "error", "waited_s": 0.5}),
    ("late", "no answer", "tier_unavailable", {"why": "late", "waited_s": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "detail", "reason", "evidence"), SAID)
def test_every_fate_of_a_block_has_its_reason(what, detail, reason, evidence):
    miss = Miss(4, 8, "disk", what, 1e9 if what in {"evicted", "removed"} else None, detail)
    explainer = Explainer(4)
    report = LoadReport((), (miss,), 0.5)
    explained = explainer.prompt(list(range(12)), Namespace(), PrefixMiss("unseen", 0), report)
    explainer.close()
    assert explained.computed == {"new": 8, reason: 4}
    assert explained.sentence
    (span,) = [span for span in explained.spans if span.reason == reason]
    assert (span.start, span.stop) == (4, 8)
    assert {**span.evidence, "tier": "disk", **evidence} == span.evidence
    if reason == "evicted":
        assert span.evidence["at"] == 1e9
        assert span.evidence["ago_s"] > 0


def test_what_a_store_never_heard_of_is_for_the_pool_to_say():
    explainer = Explainer(4)
    never = LoadReport((), (Miss(0, 8, "", "never", None, ""),))
    told = explainer.prompt(list(range(12)), Namespace(), PrefixMiss("unseen", 0), never)
    explainer.close()
    assert told.computed == {"new": 12}


class Broken:
    """An observer that always fails."""

    def __call__(self, event):
        raise RuntimeError(f"{event} is not for me")


@pytest.mark.model
def test_observers_get_the_events_of_every_request_and_hurt_none(server, caplog):
    events, notifier = [], server.engine._notifier
    before = server.stats()["engine"]["observer_errors"]
    served, notifier.observers = notifier.observers, (Broken(), events.append)
    try:
        prompt = tokens_of(1, 100)
        answers = [ask(server, prompt, "red"), ask(server, [prompt, tokens_of(2, 40)], "red")]
        body = {"prompt": prompt, "max_tokens": 3, "n": 2, "temperature": 0, "cache_salt": "red"}
        answers += [server.http.post(COMPLETIONS, json=body).raise_for_status().json()]
    finally:
        notifier.observers = served
    assert server.stats()["engine"]["observer_errors"] == before + len(events)
    failures = [record.message for record in caplog.records if "Broken" in record.message]
    kinds = {type(event).__name__ for event in events}
    assert sorted(failures) == sorted(f"observer Broken failed on {kind}" for kind in kinds)
    names = [answers[0]["id"], answers[1]["id"], answers[1]["id"] + ".1", answers[2]["id"]]
    assert list(dict.fromkeys(event.request.id for event in events)) == names
    for name in names:
        own = [event for event in events if event.request.id == name]
        assert len({id(event.request) for event in own}) == 1, "one record"
        computed = [event for event in own if isinstance(event, PromptComputed)]
        begun, admitted, ended = (event for event in own if event not in computed)
        assert isinstance(begun, RequestBegun)
        assert isinstance(admitted, RequestAdmitted)
        assert ended is own[-1]
        request = begun.request
        assert request.namespace.tenant == "red"
        tokens = sum(event.tokens for event in computed)
        assert tokens == len(request.prompt) - admitted.cached_tokens
        assert (request.origin.endpoint, request.namespace.model) == ("completions", "kvkeep-tiny")
        assert request.origin.headers["content-type"] == "application/json"
    assert (ended.outcome, ended.generated) == ("done", 6)
    assert ended.ttft_s > 0
