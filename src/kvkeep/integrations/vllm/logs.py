"""What kvkeep logs inside vLLM appears where vLLM logs, with its level and format.

vLLM gives handlers to its own logger alone. Without this, kvkeep's lines below WARNING are shown
nowhere, and others without level and name, or not at all where a package changes the root logger.
"""

from __future__ import annotations

import logging

__all__ = ["join_logs"]


def join_logs() -> None:
    """Make kvkeep's loggers children of vLLM's, so that they have its handlers and its level.

    Does nothing where ``kvkeep`` has handlers of its own, as by ``VLLM_LOGGING_CONFIG_PATH``, and
    at a second call. Thread safety: as `logging`.
    """
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    if ours.handlers or not ours.propagate or ours.parent is theirs:
        return
    ours.parent = theirs
    ours.setLevel(ours.level)  # forgets which levels were found to be enabled by the former parent
