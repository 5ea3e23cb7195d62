"""/metrics of a real server, while it serves."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.model

GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
HOSTILE = 'evil\n# HELP x\u202e\x1b[2J"}'


def scraped(server):
    answer = server.http.get("/metrics").raise_for_status()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def ask(server, *prompts, salt=None):
    for prompt in prompts:
        asked = {**GREEDY, "prompt": prompt, "cache_salt": salt}
        server.http.post("/v1/completions", json=asked).raise_for_status()


def test_who_scrapes_is_told_why_pages_go_and_when(start_server):
    with start_server(num_pages=16, what_if=1.0) as server:
        scraped(server)
        ask(server, *([number] * 100 for number in range(5)))
        server.http.post("/kv/clear", json={}).raise_for_status()
        found = scraped(server)
        stats = server.engine.cache.stats()
        by_reason = {
            key[1]: value for key, value in found.items() if key[0] == "kvkeep_evicted_pages_total"
        }
        assert by_reason["pressure"] > 0
        assert by_reason["cleared"] > 0
        assert sum(by_reason.values()) == stats.evicted_pages
        for reason in ("pressure", "cleared"):
            count = found["kvkeep_page_residency_seconds_count", reason]
            assert count == by_reason[reason]
        assert any(key[0] == "kvkeep_what_if_hit_rate" for key in found)


def test_hostile_salts_are_labels_that_prometheus_reads(start_server):
    with start_server() as server:
        ask(server, [7] * 40, salt=HOSTILE)
        ask(server, [7] * 40)
        found = scraped(server)
        (hostile,) = [
            key[1] for key in found if key[0] == "kvkeep_namespace_pages" and "evil" in key[1]
        ]
        assert hostile.isprintable()
        assert found["kvkeep_namespace_pages", hostile] > 0
        assert found["kvkeep_namespace_pages", "default"] > 0
