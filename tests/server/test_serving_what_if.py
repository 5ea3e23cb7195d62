"""What other sizes of memory would do, as a server tells it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.core.miss_ratio import TIMES

pytestmark = pytest.mark.model

COMPLETIONS = "/v1/completions"


def gauges(server):
    text = server.http.get("/metrics").text
    return {
        sample.labels["memory"]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "kvkeep_what_if_hit_rate"
        for sample in family.samples
    }


def test_it_is_told_where_somebody_watches(start_server):
    with start_server(num_pages=64, what_if=1.0) as server:
        prompt = [*range(100, 420)]  # 20 pages: a quarter of memory is too little
        for _ in range(2):
            asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            server.http.post(COMPLETIONS, json=asked).raise_for_status()
        told = server.stats()["what_if"]
        assert [point["times"] for point in told] == list(TIMES)
        assert [point["pages"] for point in told] == [16, 32, 64, 128, 256, 512]
        assert told[0]["tokens"] == 256
        # All of the second prompt but its last token, of both prompts.
        rate = 319 / 640
        assert told[2]["hit_rate"] == server.stats()["cache"]["hit_rate"] == rate
        assert [point["hit_rate"] for point in told[2:]] == pytest.approx([rate] * 4)
        assert told[0]["hit_rate"] == pytest.approx(rate * 16 / 19)  # of 19 whole pages
        found = gauges(server)
        assert list(found) == ["0.25x", "0.5x", "1x", "2x", "4x", "8x"]
        assert found["0.25x"] == pytest.approx(rate * 16 / 19)
        assert found["1x"] == rate


def test_short_prompts_agree_with_the_hit_rate(start_server):
    """A pool of many tokens, and chats of some words: what is told is in pages, not in blocks."""
    with start_server(num_pages=16_384, what_if=0.1) as server:
        system = {"role": "system", "content": "Answer in one sentence. Quote the documentation."}
        for number in range(40):
            question = {"role": "user", "content": f"What does f{number % 4} do?"}
            asked = {"messages": [system, question], "max_tokens": 1, "temperature": 0}
            server.http.post("/v1/chat/completions", json=asked).raise_for_status()
        stats = server.stats()
        rate = stats["cache"]["hit_rate"]
        assert rate > 0.5
        assert stats["cache"]["prompt_tokens"] / 40 < 64
        told = {point["times"]: point["hit_rate"] for point in stats["what_if"]}
        assert told[1] == rate
        assert list(told) == list(TIMES)
        assert all(abs(one - rate) < 0.02 for one in told.values()), "all of it fits in each"
        live = server.http.get("/kv/live").json()
        assert {one["times"]: one["hit_rate"] for one in live["what_if"]}[1] == rate


def test_nothing_is_told_where_nobody_does(server):
    assert server.stats()["what_if"] is None
    assert gauges(server) == {}
