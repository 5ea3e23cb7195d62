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
        # The last page of the prompt is never reused whole; of half the prompts, nothing was.
        assert [point["hit_rate"] for point in told] == pytest.approx([0.4, *[0.475] * 5])
        found = gauges(server)
        assert list(found) == ["0.25x", "0.5x", "1x", "2x", "4x", "8x"]
        assert found["0.25x"] == pytest.approx(0.4)
        assert found["8x"] == pytest.approx(0.475)


def test_nothing_is_told_where_nobody_does(server):
    assert server.stats()["what_if"] is None
    assert gauges(server) == {}
