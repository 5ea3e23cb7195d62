"""What a trace is too short to tell."""

from __future__ import annotations

from replaying import workload

from kvkeep.bench.replay import infinite, simulate
from kvkeep.bench.replay.summary import FEW_REQUESTS, doubts


def said(paths, memory=120):
    work = workload(paths)
    return " ".join(doubts(simulate(work, memory), infinite(work), work.span_s, "a size"))


def turns(requests, different):
    return [[("again", at % different), 1, 2, 3] for at in range(requests)]


def test_a_long_trace_raises_no_doubt():
    assert said(turns(FEW_REQUESTS, 20)) == ""


def test_few_requests():
    assert f"has {FEW_REQUESTS - 1} requests, too few" in said(turns(FEW_REQUESTS - 1, 20))


def test_a_trace_that_fits_tells_nothing_of_policies():
    assert "All KV of the trace fits into a size" in said(turns(400, 20), memory=10_000)
    assert "fits" not in said([[("once", at), 1] for at in range(400)], memory=10_000)


def test_reuse_after_pauses_as_long_as_the_trace():
    late = [[("again", at % 260), 1] for at in range(400)]
    assert "100.0\u00a0% of all reuse comes after a pause" in said(late)
    assert "covers 6.65\u00a0min" in said(late)
