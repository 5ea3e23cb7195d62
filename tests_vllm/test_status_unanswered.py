"""The status says where a shared tier did not tell what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import prompt
from watched import watched

if TYPE_CHECKING:
    from conftest import Server


@pytest.mark.parametrize("why", ["late", "not_asked"])
def test_shared_tiers_that_do_not_answer_are_said(llama: str, server: Server, why: str) -> None:
    """Others may have stored a prompt, and the tier did not tell in time, or was not asked."""
    compared = why == "not_asked"  # this model computes faster than any lookup that hangs
    extra = {"lookup_timeout": 0.3, "flush_timeout": 0.5, "compare_costs": compared}
    with watched(llama, ["memory://4MiB", server.url(timeout="60s")], extra=extra) as one:
        one.engine.ask([prompt(300, seed=20)])
        server.hang()
        for seed in range(21, 25):
            one.engine.ask([prompt(300, seed=seed)])
        said = one.last()
        (span,) = [at for at in said["spans"] if at["reason"] == "tier_unavailable"]
        assert (span["start"], span["stop"]) == (0, 288)
        assert span["evidence"]["why"] == why
        if why == "late":
            assert span["evidence"]["tier"] == "valkey"
            assert "tier 'valkey' may have them and did not answer in time" in said["sentence"]
        else:
            assert "was not asked, because its answers take longer" in said["sentence"]
        server.go_on()
