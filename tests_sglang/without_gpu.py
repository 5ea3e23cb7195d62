"""SGLang on a machine without a GPU: importing this imports its host pools and controllers."""

from __future__ import annotations

import warnings

import torch

# torchvision's compiled part is for CUDA and does not load beside a CPU build of torch. What SGLang
# takes of it while it is imported is Python, and asks that these two names are there.
_VISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _VISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it has no GPU for
    import sglang.srt.managers.cache_controller
    import sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller
    import sglang.srt.mem_cache.pool_host.mamba
    import sglang.srt.observability.metrics_collector  # noqa: F401
    import transformers  # noqa: F401
