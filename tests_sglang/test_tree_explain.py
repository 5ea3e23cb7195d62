"""Why prompts missed the tree inside SGLang: reasons, their log, and what is never blamed."""

from __future__ import annotations

import json
import logging
import logging.config
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.utils.common import configure_logger
from test_tree import Walk, ours
from tree_scheduler import Scheduler, memory

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.eviction import policy as named
from kvkeep.integrations.sglang.tree import KVKeepTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.observe.explain import Explainer, Explanation

PAGE = 4


@contextmanager
def explained(pages: int = 64, page: int = PAGE) -> Iterator[tuple[Scheduler, Explainer]]:
    params = memory(page, pages)
    tree = KVKeepTree(params, lambda: named("lru"))
    try:
        yield Scheduler(tree, params), tree.explain()
    finally:
        tree._hooks._explained.close()


def row(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def keep(one: Scheduler, tokens: list[int], **more: Any) -> str:
    req = one.admit(tokens, **more)
    assert req is not None
    one.finish(req)
    return str(req.rid)


def spans(said: Explanation | None) -> list[tuple[int, int, str | None]]:
    assert said is not None
    return [(span.start, span.stop, span.source or span.reason) for span in said.spans]


def test_every_token_has_a_source_or_a_reason() -> None:
    with explained(pages=128) as (one, explainer):
        rules = row(100, 60)
        first = keep(one, [1, 2, 3, 7, *rules], cache_salt="a")
        again = keep(one, [1, 2, 3, 7, *rules, 5, 6], cache_salt="a")
        other = keep(one, [1, 2, 3, 8, *rules], cache_salt="a")
        salt = keep(one, [1, 2, 3, 7, *rules[:20]], cache_salt="b")
        one.evict(10_000)
        gone = keep(one, [1, 2, 3, 7, *rules], cache_salt="a")
        assert spans(explainer.explain(first)) == [(0, 64, "new")]
        assert spans(explainer.explain(again)) == [(0, 64, "pool"), (64, 66, "new")]
        assert spans(explainer.explain(other)) == [
            (0, 3, "page_remainder"), (3, 4, "new"), (4, 64, "diverged"),
        ]  # fmt: skip
        assert spans(explainer.explain(salt)) == [(0, 24, "other_namespace")]
        said = explainer.explain(gone)
        assert spans(said) == [(0, 64, "evicted")]
        assert said is not None
        evidence = said.spans[0].evidence
        assert (evidence["cause"], evidence["policy"]) == ("pressure", "lru")
        assert said.outcome == "done"


def test_requests_of_one_batch_could_not_have_reused_each_others_tokens() -> None:
    with explained() as (one, explainer):
        tokens = row(0, 20)
        both = [one.admit(tokens, chunk=0), one.admit([*tokens, 1], chunk=0)]
        for req in both:  # SGLang publishes them one after another
            assert req is not None
            one.compute(req)
            one.finish(req)
        assert spans(explainer.explain("r1")) == [(0, 20, "new")]
        said = explainer.explain("r2")
        assert said is not None
        assert said.computed == {"computing": 20, "new": 1}
        assert said.spans[0].evidence["by"] == "r1"
        assert spans(explainer.explain(keep(one, tokens))) == [
            (0, 16, "pool"), (16, 19, "page_remainder"), (19, 20, "last_token"),
        ]  # fmt: skip


def test_requests_that_are_given_up_compute_nothing_any_more() -> None:
    with explained() as (one, explainer):
        req = one.admit(row(0, 40), chunk=8)
        assert req is not None
        one.retract(req)
        said = explainer.explain("r1")
        assert said is not None
        assert said.outcome == "given_up"
        other = explainer.explain(keep(one, row(0, 40)))
        assert spans(other) == [(0, 8, "pool"), (8, 40, "not_admitted")]
        assert other is not None
        assert other.spans[1].evidence["why"] == "given_up"
        assert one.resume(req)  # and is explained anew
        one.finish(req)
        assert spans(explainer.explain("r1")) == [
            (0, 36, "pool"), (36, 39, "page_remainder"), (39, 40, "last_token"),
        ]  # fmt: skip


def test_flushed_tokens_say_so() -> None:
    with explained() as (one, explainer):
        keep(one, row(0, 16))
        one.flush()
        said = explainer.explain(keep(one, row(0, 16)))
        assert spans(said) == [(0, 16, "evicted")]
        assert said is not None
        assert said.spans[0].evidence["cause"] == "cleared"


def test_a_reset_gives_up_what_runs() -> None:
    with explained() as (one, explainer):
        req = one.admit(row(0, 40), chunk=8)
        assert req is not None
        one.cache.reset()
        assert not one.cache._hooks._numbers
        one.cache.unlock(req.lock)
        said = explainer.explain("r1")
        assert said is not None
        assert said.outcome == "given_up"


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_are_explained_to_the_token(page: int, seed: int) -> None:
    rng = random.Random(seed)
    made = ours(page, rng.choice([12, 40]))
    explainer = made.cache.explain()
    hooks = made.cache._hooks
    found: dict[str, int] = {}
    compute = made.compute

    def first(req: Any, chunk: int = 10_000) -> None:
        found.setdefault(f"{req.rid} {req.retraction_count}", req.prefix_len)
        compute(req, chunk)

    made.compute = first
    Walk(made, rng).run(150)
    assert not hooks._numbers, "numbers of requests that are over"
    assert not hooks._explained._running
    assert not explainer.failed
    assert not explainer.lost
    told = explainer.recent(10_000)
    assert len(told) > 10
    for said in told:
        assert sum(span.tokens for span in said.spans) == said.prompt_tokens
        starts = {tokens for name, tokens in found.items() if name.split()[0] == said.id}
        pool = said.reused.get("pool", 0)
        assert pool in {min(tokens, said.prompt_tokens - 1) for tokens in starts}
        assert all(span.evidence.get("cause") != "unknown" for span in said.spans), said
    hooks._explained.close()


def test_the_log_has_a_line_for_each_request_if_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    params = memory(PAGE, 64)
    quiet = Scheduler(KVKeepTree(params, lambda: named("lru")), params)
    keep(quiet, row(0, 16))
    assert quiet.cache._hooks._explained is None
    assert not [one for one in threading.enumerate() if one.name.startswith("kvkeep-explain")]
    caplog.set_level(logging.DEBUG, "kvkeep.sglang.explain")
    params = memory(PAGE, 64)
    one = Scheduler(KVKeepTree(params, lambda: named("lru")), params)
    keep(one, row(0, 16))
    keep(one, [*row(0, 16), 9])
    one.cache._hooks._explained.close()
    lines = [line.getMessage() for line in caplog.records if line.name == "kvkeep.sglang.explain"]
    assert lines == [
        "request 'r1': 16 of 16 tokens computed: they were never seen before",
        "request 'r2': 1 of 17 tokens computed: the last token always is, all others came from "
        "the pool",
    ]
    params = memory(PAGE, 64, is_eagle=True)
    pairs = KVKeepTree(params, lambda: named("lru"))  # the server starts nevertheless
    with pytest.raises(UnsupportedModel, match="EAGLE"):
        pairs.explain()


def test_every_thousand_requests_the_log_sums_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvkeep.sglang.explain")
    with explained(pages=8) as (one, _):
        for at in range(1000):
            keep(one, row(at * 8, 8))
    (line,) = [line.getMessage() for line in caplog.records if "requests:" in line.getMessage()]
    assert line.startswith("the last 1000 requests: 100 % of all computed tokens: prompts without")


def test_the_configuration_of_logs_in_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reads it; the tree then explains."""
    from pathlib import Path as Place

    page = (Place(__file__).parents[1] / "docs" / "sglang.md").read_text("utf-8")
    text = page.partition("`logging.json`:")[2].partition("```json\n")[2].partition("```")[0]
    config = tmp_path / "logging.json"
    config.write_text(text)
    assert json.loads(text)["version"] == 1
    monkeypatch.setenv("SGLANG_LOGGING_CONFIG_PATH", str(config))
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        configure_logger(None)
        params = memory(PAGE, 64)
        tree = KVKeepTree(params, lambda: named("lru"))
        assert tree._hooks._explained is not None
        tree._hooks._explained.close()
        assert not logging.getLogger("sglang").isEnabledFor(logging.DEBUG)
    finally:
        logging.getLogger("kvkeep.sglang.explain").setLevel(logging.NOTSET)
        root.setLevel(before[0])
        root.handlers[:] = before[1]
