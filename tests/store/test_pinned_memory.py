"""The memory that a GPU copies from and to; CUDA is a stand-in that notes what it is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvkeep.store import BlockStore


@pytest.mark.parametrize("refused", [0, 2])
def test_all_of_the_first_tier_is_pinned_until_the_end(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    told: list[tuple[str, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        assert (address > 0, flags) == (True, 0)
        told.append(("pin", size))
        return refused

    def unregister(address: int) -> None:
        told.append(("unpin", address > 0))

    def kernel(*_shape: int, device: str) -> None:
        told.append((device, 1))
        raise RuntimeError("CUDA error: of what was refused before")

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", kernel)
    store = BlockStore("pinned", tiers=["memory://1MiB"])
    assert told == []
    store.pin_memory()
    store.pin_memory()
    # A kernel takes the error of a refusal, which an engine's next one would raise.
    assert told == [("pin", 1 << 20), *([("cuda", 1)] if refused else [])]
    store.close()
    store.close()
    assert told[1:] == [("cuda", 1) if refused else ("unpin", 1)]


def test_without_cuda_nothing_changes() -> None:
    with BlockStore("pageable", tiers=["memory://1MiB"]) as store:
        store.pin_memory()
        assert store.put([bytes(32)], [b"1"]) == 1
