"""``kvkeep serve --share`` over a store: a flooding tenant leaves others their KV in the tiers."""

from __future__ import annotations

import argparse

import pytest
from real_server import NAME, Running

from kvkeep.cli.serve import _store
from kvkeep.cli.serve_options import add_options
from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Runner, Tokenizer
from kvkeep.serve.models import bundled_model
from kvkeep.serve.server import ServerSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

PROMPT = [7, 8, 9, 10] * 80  # five blocks of 64
BLOCKS = 20


@pytest.mark.parametrize("options", [[], ["--share", "a=3", "--share", "flooder=1"]])
def test_shares_reach_the_tiers(tmp_path, options):
    runner = Runner.load(bundled_model(), num_pages=64, page_size=16, device="cpu")
    record = 64 * runner.geometry.bytes_per_token + 4096
    parser = argparse.ArgumentParser()
    add_options(parser)
    tiers = [f"memory://{BLOCKS * record}B", f"file://{tmp_path}/tier?size={BLOCKS * record}B"]
    words = [*options, "--block-tokens", "64", "--tiering", "exclusive"]
    args = parser.parse_args([*words, *(word for url in tiers for word in ("--tier", url))])
    with _store(args, runner, NAME, None) as store:
        cache = PagedCache(64, 16)  # without shares: the flooder takes it all
        engine = Engine(runner, cache, Tokenizer.load(bundled_model()), store=store)
        server = Running(engine, ServerSettings(name=NAME))
        try:
            assert ask(server, PROMPT, "a") == 0
            for number in range(20):  # 100 blocks
                assert ask(server, [20 + number, *PROMPT[1:]], "flooder") == 0
            assert ask(server, PROMPT, "a") == (len(PROMPT) - 1 if options else 0)
        finally:
            server.stop()
        store.check()


def ask(server, prompt, salt):
    """Return how many tokens came from the tiers."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["usage"]["kvkeep"]["loaded_tokens"]
