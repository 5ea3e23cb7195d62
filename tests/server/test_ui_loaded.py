"""Tokens loaded from tiers, on the dashboard."""

from __future__ import annotations

import pytest
from browsing import live, plain
from real_server import eventually
from see_help import ask, forget_pool, storing, tokens_of, written

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

BIG = "memory://16MiB"
# Two prompts that part within a block: of their third block each has its own.
HEAD = tokens_of(1, 160)
LONG = [HEAD + tokens_of(seed, 97) for seed in (2, 3)]
SHORT = tokens_of(4, 49)  # shorter than a block


def planted(server, *prompts):
    for prompt in prompts:
        ask(server, prompt)
    written(server, *prompts)


def test_loaded_tokens_count_once_in_the_hit_rate(opened):
    with storing(BIG) as server, opened(server) as page:
        planted(server, SHORT, LONG[0])
        for _ in range(3):
            forget_pool(server, LONG[0])
            ask(server, LONG[0])
        live(page)
        # Of a prompt of 49 tokens and four of 257, three times 256.
        said = "of the last ten minutes; 71 % since the start"
        note, saved = page.locator("#rate .note"), page.locator("#saved-tile .note")
        eventually(lambda: plain(note.inner_text()) == said)
        assert "768 tokens were not computed, 768 of them from tiers" in plain(saved.inner_text())
