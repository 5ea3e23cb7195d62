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


def test_hostile_salts_are_labels_that_prometheus_reads(start_server):
    with start_server() as server:
        ask(server, [7] * 40, salt=HOSTILE)
        ask(server, [7] * 40)
        scraped(server)  # series of namespaces begin here
        ask(server, [7] * 40, salt=HOSTILE)
        ask(server, [7] * 40)
        found = scraped(server)
        name = "kvkeep_namespace_tokens_total"
        ((_, hostile, _),) = [
            key for key in found if key[0] == name and "evil" in key[1] and key[2] == "prompt"
        ]
        assert hostile.isprintable()
        assert found[name, hostile, "prompt"] == found[name, "default", "prompt"] == 40


def test_every_prompt_token_was_reused_or_computed_for_a_reason(start_server):
    with start_server() as server:
        shared = [7] * 64
        ask(server, [*shared, *[8] * 40], [*shared, *[9] * 40], [*shared, *[9] * 40], salt="a")
        ask(server, [*shared, *[9] * 40], salt="b")
        found = scraped(server)

        def total(name):
            return sum(value for key, value in found.items() if key[0] == name)

        prompts = 4 * 104
        assert total("kvkeep_prompt_tokens_total") == prompts
        hits = total("kvkeep_hit_tokens_total")
        assert (
            hits == found["kvkeep_hit_tokens_total", "pool"] == total("kvkeep_cached_tokens_total")
        )
        assert hits == total("kvkeep_prefill_saved_tokens_total") == 64 + 96
        assert total("kvkeep_prefill_computed_tokens_total") == prompts - hits
        assert total("kvkeep_recomputed_tokens_total") == prompts - hits
        assert found["kvkeep_recomputed_tokens_total", "last_token"] >= 1
        assert total("kvkeep_prefill_saved_seconds_total") > 0
        warm = found["kvkeep_time_to_first_token_by_warmth_seconds_count", "warm"]
        assert (warm, found["kvkeep_time_to_first_token_seconds_count",]) == (2, 4)
