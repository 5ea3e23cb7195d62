"""Small files for the tests of readers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *lines: Any) -> Path:
    """A line each; what is no text is written as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def mooncake(time: float = 0, tokens: int = 1024, output: float = 5, **more: Any) -> dict[str, Any]:
    """A line of Mooncake's."""
    ids = list(range(-(-tokens // 512)))
    return {
        "timestamp": time,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": ids,
        **more,
    }
