"""What the server's observer makes of what engine and store tell."""

from __future__ import annotations

import pytest
from see_help import COMPLETIONS, ask, tokens_of

from kvkeep.core.keys import Namespace
from kvkeep.observe.explain import Explainer
from kvkeep.serve.server.watching import missing
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
    ("refused", "version: 9", "not_admitted", {"why": "unknown"}),
    ("damaged", "checksum", "damaged", {}),
    ("unavailable", "breaker", "tier_unavailable", {"why": "breaker", "waited_s": 0.5}),
    ("unavailable", "refused: errno 111", "tier_unavailable", {"why": "error", "waited_s": 0.5}),
    ("late", "no answer", "tier_unavailable", {"why": "late", "waited_s": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "detail", "reason", "evidence"), SAID)
def test_every_fate_of_a_block_has_its_reason(what, detail, reason, evidence):
    fate = Miss(4, 8, "disk", what, 1e9 if what in {"evicted", "removed"} else None, detail)
    (told,) = missing([fate], waited_s=0.5)
    assert (told.start, told.stop, told.reason) == (4, 8, reason)
    assert {**told.evidence, "tier": "disk", **evidence} == told.evidence
    if reason == "evicted":
        assert told.evidence["at"] == 1e9
        assert told.evidence["ago_s"] > 0
    explainer = Explainer(4)
    explained = explainer.prompt(list(range(12)), Namespace(), 0, missing=[told])
    explainer.close()
    assert explained.computed == {"new": 8, reason: 4}
    assert explained.sentence


def test_what_a_store_never_heard_of_is_for_the_explainer_to_say():
    assert missing([Miss(0, 8, "", "never", None, "")]) == []


class Recorder:
    """A watch that writes down what it is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda id, **more: self.told.append((id, name, more))


class Broken:
    """A watch that always fails."""

    def __getattr__(self, name):
        raise RuntimeError(f"{name} is not for me")


@pytest.mark.model
def test_watches_are_told_of_every_request_by_name_and_hurt_none(server, caplog):
    recorder, watching = Recorder(), server.service.watching
    before, watching._watches = watching._watches, [Broken(), recorder]
    try:
        prompt = tokens_of(1, 100)
        answers = [ask(server, prompt, "red"), ask(server, [prompt, tokens_of(2, 40)], "red")]
        body = {"prompt": prompt, "max_tokens": 3, "n": 2, "temperature": 0, "cache_salt": "red"}
        answers += [server.http.post(COMPLETIONS, json=body).raise_for_status().json()]
    finally:
        watching._watches = before
    assert server.stats()["engine"]["observer_errors"] == 0
    assert [record.message for record in caplog.records if "Broken" in record.message] == [
        "Broken failed; it is told on"
    ]
    names = [answers[0]["id"], answers[1]["id"], answers[1]["id"] + ".1", answers[2]["id"]]
    assert list(dict.fromkeys(id for id, _, _ in recorder.told)) == names
    for name in names:
        told = [(what, more) for id, what, more in recorder.told if id == name]
        assert [what for what, _ in told if what != "computed"] == ["begun", "admitted", "ended"]
        assert told[-1][0] == "ended"
        (admitted,) = [more for what, more in told if what == "admitted"]
        assert admitted["namespace"] == "red"
        computed = sum(more["tokens"] for what, more in told if what == "computed")
        assert computed == admitted["prompt_tokens"] - admitted["cached_tokens"]
    (begun,) = [more for id, what, more in recorder.told if (id, what) == (names[0], "begun")]
    assert (begun["kind"], begun["model"]) == ("completions", "kvkeep-tiny")
    assert begun["headers"]["content-type"] == "application/json"
    (ended,) = [more for id, what, more in recorder.told if (id, what) == (names[-1], "ended")]
    assert (ended["outcome"], ended["generated"]) == ("done", 6)
    assert ended["ttft_s"] > 0
