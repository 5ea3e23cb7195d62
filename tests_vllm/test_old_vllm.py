"""A version of vLLM that is too old for the tier below its offloading is told at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import vllm
from versions import NO_TIERS

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.vllm import versions
from kvkeep.integrations.vllm.tier import KVKeepSpec, KVKeepTier

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    "make",
    [lambda: KVKeepSpec(None), lambda: KVKeepTier(None, memoryview(b""), "KVKeepTier")],
    ids=["spec", "tier"],
)
def test_a_vllm_that_does_not_tell_positions(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    if not NO_TIERS:
        versions.require_tiers()
        monkeypatch.setattr(versions, "ReqContext", object)
    with pytest.raises(UnsupportedModel) as refused:
        make()
    assert "need vLLM 0.31 or newer" in str(refused.value)
    assert f"vLLM {vllm.__version__} does not" in str(refused.value)
    assert "take KVKeepConnector" in str(refused.value)
