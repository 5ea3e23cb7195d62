"""Which weights vLLM loaded, as the revision of a namespace.

vLLM loads the weights itself, and packs them before a connector is made. So they are named by the
files that it read:

    a directory          its identity, if nothing in it changed since the process began
    a commit of the hub  the commit, if the configuration that vLLM holds is of the same one
    anything else        a name that no other process has, and a warning that says why
"""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm import envs

from kvkeep.errors import InvalidValue
from kvkeep.integrations import loaded

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["revision_of"]

_LOG = logging.getLogger("kvkeep.vllm")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# Formats that read safetensors files of the model's directory; all of those are in its identity.
_SAFETENSORS: Final = {
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer",
}  # fmt: skip
_ADVICE: Final = 'kv_connector_extra_config: {"revision": "…"}'


def revision_of(vllm_config: VllmConfig, given: str) -> str:
    """Name the weights; ``given`` is the option ``revision``, which is believed."""
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
        return _own(f"--load-format {load_format} may read files that are not looked at")
    try:
        if Path(model.model).is_dir():
            return loaded.identity_since(str(model.model), loaded.process_began())
        return _commit(model, load.download_dir)
    except InvalidValue as error:
        return _own(str(error))


def _commit(model: ModelConfig, download_dir: str | None) -> str:
    """The commit of the hub that was loaded.

    Raises:
        InvalidValue: that is not known.
    """
    if envs.VLLM_USE_MODELSCOPE:
        raise InvalidValue("ModelScope says no commit")
    known = str(getattr(model.hf_config, "_commit_hash", None) or "")
    if model.revision and _COMMIT.fullmatch(model.revision):
        return f"commit {model.revision}"
    # A branch can move between the loading of the configuration, of the weights, and now.
    if _COMMIT.fullmatch(known) and known == _downloaded(model, download_dir):
        return f"commit {known}"
    raise InvalidValue(f"{model.model} at revision {model.revision} may be other weights tomorrow")


def _downloaded(model: ModelConfig, download_dir: str | None) -> str:
    """The commit at which the model's branch is on this machine; empty: there is none."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        snapshot = snapshot_download(
            model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True
        )
    except (LocalEntryNotFoundError, ValueError, OSError):
        return ""
    return Path(snapshot).name


def _own(reason: str, advice: str = _ADVICE) -> str:
    _LOG.warning(
        "kvkeep cannot tell which weights the model has: %s. What it stores will be found by this "
        "process alone%s",
        reason,
        f"; to keep it, say which weights they are: {advice}" if advice else "",
    )
    return f"process {secrets.token_hex(16)}"
