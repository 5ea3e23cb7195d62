"""`Recorder`: writes a trace of vLLM's requests, to be replayed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.traces import Capture, Seen, Served
from kvkeep.core.keys import Namespace
from kvkeep.integrations.vllm.ends import SUCCEEDED, AnswerEnds

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.groups import Groups

__all__ = ["Recorder"]


class Recorder:
    """Writes a line for each request that ends: times, lengths and keyed hashes, no text.

    An id stands for a block of the engine. The scheduler cannot see when the first token was sent:
    the trace has the time to the first step instead. Requests with embeddings only are left
    out. Raises `InvalidValue` if the file exists.

    Thread safety: the scheduler's thread. Cost: a copy of the tokens; a thread does the rest.
    """

    def __init__(self, path: str, vllm_config: VllmConfig, groups: Groups) -> None:
        self._ends = AnswerEnds(vllm_config)
        parallel = vllm_config.parallel_config
        file = Path(path)
        if parallel.data_parallel_size > 1:  # each rank has a scheduler
            file = file.with_name(f"rank{parallel.data_parallel_rank}-{file.name}")
        self._capture = Capture(
            file,
            name=str(vllm_config.model_config.served_model_name),
            page_size=groups.block_tokens,
            pages=vllm_config.cache_config.num_gpu_blocks or 0,
        )

    def ended(
        self, request: Request, *, cached: int, loaded: int, first: float | None, store: bool
    ) -> None:
        """Record a request that ended; ``first`` is when it was first computed, by `time.time`."""
        if request.prompt_token_ids is None:
            return
        now = time.time()
        arrived = time.perf_counter() - (now - request.arrival_time)
        served = None
        if request.status.name in SUCCEEDED and first is not None:
            since = request.arrival_time
            served = Served(cached, loaded, max(0.0, first - since), max(0.0, now - since))
        self._capture.note(
            Seen(
                arrived=arrived,
                prompt=np.array(request.prompt_token_ids, np.int32),
                namespace=_namespace(request),
                answer=list(request.output_token_ids),
                store=store,
                served=served,
                stop=self._ends.of(request).stop or "",
            )
        )

    def close(self) -> None:
        """Write queued lines, and end the file."""
        self._capture.close()


def _namespace(request: Request) -> Namespace:
    """Return a namespace of all that the KV depends on besides tokens: salt, images, LoRA."""
    seen = [feature.identifier for feature in getattr(request, "mm_features", None) or ()]
    lora = request.lora_request
    return Namespace(
        tenant=" ".join([request.cache_salt or "", *seen]),
        lora="" if lora is None else lora.lora_name,
    )
