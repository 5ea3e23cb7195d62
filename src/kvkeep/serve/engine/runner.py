"""`Runner`: a model and the memory of its pages; runs forward passes and schedules nothing."""

from __future__ import annotations

import platform
import weakref
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.groups import GroupPlan
from kvkeep.core.groups.tensors import GroupedTensors
from kvkeep.core.pages import PageCopy
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import loading, probe
from kvkeep.serve.engine.attention.batch import PagedBatch, is_paged
from kvkeep.serve.engine.attention.memory import KVMemory
from kvkeep.store.identity import ModelWatch, model_identity

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from kvkeep.core.groups import GroupLayout, RowCopy, StateCopy
    from kvkeep.core.pages.tensors import Layout
    from kvkeep.serve.engine.attention.batch import Piece

__all__ = ["Runner", "device_name"]

_MOST = 100  # characters


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() if device.type == "cpu" else str(device)


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name" and value.strip():
                    return value.strip()[:_MOST]
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine() or "cpu"


class Runner:
    """Runs a Transformers causal model over pages.

    ``identity`` names the model as it was given (`kvkeep.store.model_identity`), ``geometry`` is
    what it keeps. The memory is ``tensors`` of a plain model, whose layers all keep every token,
    and ``groups`` of a hybrid one, where ``plan`` says what lies where. ``num_pages`` and
    ``page_size`` are the size of that memory; `cache` makes a `PagedCache` for it, which decides
    which sequence owns which page. ``vocabulary`` is the number of token ids, ``end_tokens`` are
    those that end a text, ``context_tokens`` is the longest sequence that the model is made for
    (None: any), and ``max_tokens`` the longest one that pool and model allow.

    Thread safety: none; one thread computes at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: KVGeometry,
        *,
        num_pages: int,
        page_size: int,
        layout: Layout = "NHD",
    ) -> None:
        """Take over ``model``: replace its attention, if that leaves its results the same.

        What keeps a state is replaced as well. A model whose results differ over pages, or that
        does not go on from a state, raises `UnsupportedModel` with the reason.

        The model's identity is computed first: about 0.1 s a GiB on a CPU. In float32 on a CPU,
        linear layers keep their weights twice, up to 1 GiB more in all (see
        `loading.PackedLinear`).
        """
        if is_paged(model):
            raise IllegalStep("this model was taken over by a Runner before; load it once more")
        self.identity = model_identity(model)
        self.model = model
        self.geometry = geometry
        self.device = model.device
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocabulary = loading.vocabulary(model)
        self.end_tokens = loading.end_tokens(model)
        self.context_tokens = loading.context_tokens(model.config)
        self.plan = GroupPlan(geometry, page_size)
        self.max_tokens = self._longest()
        self._model, found = probe.prove(model, geometry)
        loading.pack(model)
        self.groups: GroupedTensors | None = None
        self._tensors: PagedTensors | None = None
        # Page ids come from the cache and are valid; a check on a GPU would wait for it each time.
        if self.plan.layout is None:
            self._tensors = PagedTensors(
                geometry,
                num_pages,
                page_size,
                device=self.device,
                layout=layout,
                check_ids=False,
            )
            self._memory = KVMemory.plain(self._tensors, shared=found.shared, latent=found.latent)
        else:
            self.groups = GroupedTensors(
                self.plan, num_pages, self.device, layout=layout, check_ids=False
            )
            self._memory = KVMemory.grouped(self.groups, shared=found.shared, latent=found.latent)
        self._watch = ModelWatch(model)
        self._cache: weakref.ref[PagedCache] | None = None

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        memory: int | str | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
    ) -> Runner:
        """Load a local Hugging Face model directory, with pages for ``memory`` bytes ("4GiB").

        ``num_pages`` sets the number of pages instead; give one of the two. ``device`` "auto" is
        the GPU if there is one. ``dtype`` None is the dtype of the saved weights, and float32 on a
        CPU.

        Raises `InvalidValue` (no model there, no page fits) and `UnsupportedModel` (not a causal
        model, a cache that is not K and V, weights that do not load).
        """
        if (memory is None) == (num_pages is None):
            raise InvalidValue(
                f"give memory or num_pages, one of the two; got {memory=}, {num_pages=}"
            )
        config = loading.load_config(path)
        on = loading.pick_device(device)
        geometry = KVGeometry.from_config(path)
        compute = loading.pick_dtype(dtype, geometry.dtype, on)
        geometry = geometry.with_dtype(str(compute))
        if num_pages is None:
            assert memory is not None
            num_pages = GroupPlan(geometry, page_size).pages_in(memory)
        model = loading.load_model(path, config, on, compute)
        return cls(model, geometry, num_pages=num_pages, page_size=page_size)

    def _longest(self) -> int:
        """Return the longest sequence that pool and model allow, in tokens."""
        most = self.num_pages * self.page_size
        if self.context_tokens is not None:
            most = min(most, self.context_tokens)
        if self.plan.layout is None:
            return most
        longest = bisect_right(range(most + 1), self.num_pages, key=self.plan.pages_for) - 1
        if longest < 1:
            raise InvalidValue(
                f"{self.num_pages} pages hold no sequence of this model: one of a single token "
                f"takes {self.plan.pages_for(1)}; give it more memory"
            )
        return longest

    @property
    def layout(self) -> GroupLayout | None:
        """What `PagedCache` takes in place of a page size; None for a plain model."""
        return self.plan.layout

    @property
    def tensors(self) -> PagedTensors:
        """The memory of the pages of a plain model; a hybrid model has `groups`."""
        assert self._tensors is not None, "a hybrid model has `groups`"
        return self._tensors

    def cache(self, **options: Any) -> PagedCache:
        """Return an empty `PagedCache` for these pages; ``options`` are its keyword arguments."""
        return PagedCache(self.num_pages, self.layout or self.page_size, **options)

    def check_model(self) -> None:
        """Raise `IllegalStep` if the model was changed since this runner took it over.

        New KV would no longer match the cached KV. `ModelWatch` lists the changes that are noticed.
        Cost: about 0.1 ms for a model of 4 layers, 1 ms for 32; on a GPU it waits for running
        kernels.
        """
        if (what := self._watch.changed()) is not None:
            raise IllegalStep(
                f"the model that this runner serves was changed: {what}. Cached KV is of the model "
                "as it was; make another Runner, cache and store for it"
            )

    def serve(self, cache: PagedCache) -> None:
        """Let ``cache`` own the pages from now on; the KV in them is lost."""
        self._cache = weakref.ref(cache)

    def serves(self, cache: PagedCache) -> bool:
        """Whether ``cache`` owns the pages."""
        return self._cache is not None and self._cache() is cache

    def copy(self, copies: Iterable[PageCopy | RowCopy | StateCopy]) -> None:
        """Make copies of pages, rows and states, in order."""
        if self.groups is not None:
            self.groups.copy(copies)
            return
        pages = list(copies)
        assert all(isinstance(copy, PageCopy) for copy in pages), "a plain model has pages alone"
        self.tensors.copy(cast("list[PageCopy]", pages))

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Compute ``pieces``: write their KV to their pages and return logits.

        Returns [sum of ``outputs``, vocabulary]: the logits of the last ``outputs`` tokens of each
        piece, in order. Pieces of one call must not depend on each other. Cost: one forward pass of
        the model over all tokens of the pieces, and its head over the outputs.
        """
        return self._model.run(PagedBatch(pieces, self._memory), self.groups)
