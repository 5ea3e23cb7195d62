"""The identity of the weights that vLLM loaded, as the revision of a namespace.

vLLM loads and packs the weights before it makes a connector, so they are named by their files:

    a directory     its identity, if nothing in it changed since the process began
    the hub         the same for the downloaded files, or the commit, if the branch did not move
    anything else   a name that no other process has, and a warning with the reason
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm import envs

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.loaded import SAFETENSORS_FORMATS, loaded_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["revision_of"]

_LOG = logging.getLogger("kvkeep.vllm")
_SAFETENSORS: Final = SAFETENSORS_FORMATS | {"hf", "instanttensor"}
_ADVICE: Final = 'kv_connector_extra_config: {"revision": "…"}'


def revision_of(vllm_config: VllmConfig, given: str) -> str:
    """Return the revision of the weights; the option ``revision``, ``given``, is trusted."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return _own("the scales of its KV are computed anew by every process", "")
    if vllm_config.weight_transfer_config is not None:
        return _own("its weights are replaced while it runs (weight_transfer_config)", "")
    if given:
        return given
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(load.load_format)
    if load_format == "dummy":
        return _own("its weights are dummies")
    if load_format not in _SAFETENSORS or (model.model_weights or model.model) != model.model:
        return _own(f"--load-format {load_format} may read files that kvkeep does not check")
    if envs.VLLM_USE_MODELSCOPE and not Path(model.model).is_dir():
        return _own("ModelScope gives no commit")
    try:
        return loaded_identity(str(model.model), model.revision, load.download_dir)
    except InvalidValue as error:
        return _own(str(error))


def _own(reason: str, advice: str = _ADVICE) -> str:
    """Return a name that no other process has, and warn."""
    _LOG.warning(
        "kvkeep cannot identify the weights of the model: %s. Only this process will find what it "
        "stores%s",
        reason,
        f"; to reuse it later, name the weights: {advice}" if advice else "",
    )
    return f"process {secrets.token_hex(16)}"
