"""``kvkeep size``: the size of a model's KV, and how much of it fits into a memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_json, add_model_path, add_option, add_page_size
from kvkeep.cli.tables import print_facts
from kvkeep.core.geometry import KVGeometry, format_bytes, parse_bytes

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "run"]

_PROMPTS = (8 * 1024, 32 * 1024, 128 * 1024)


@dataclass(frozen=True)
class _Sizes:
    """The KV that fits into ``memory`` bytes; all counts are per tensor-parallel rank."""

    model: str
    geometry: KVGeometry
    page_size: int
    memory: int

    @property
    def pages(self) -> int:
        return self.geometry.pages_in(self.memory, self.page_size)

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    def prompts(self, length: int) -> int:
        """Return how many prompts of ``length`` tokens fit, each in its own pages."""
        return self.pages // -(-length // self.page_size)


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "size",
        help="the size of a model's KV, and how much of it fits into a memory",
        description="Read a model's configuration and print the bytes of a token and a page of its "
        "KV, and how many pages, tokens and prompts fit into a memory. No weights are loaded.",
    )
    add_model_path(parser, "local Hugging Face model directory or its config.json")
    parser.add_argument(
        "--memory", metavar="SIZE", required=True, help="memory for KV per GPU, such as 24GiB"
    )
    add_page_size(parser)
    add_option(parser, "--tp RANKS", "tensor-parallel ranks", type=int, default=1)
    parser.add_argument(
        "--dtype", help="type of the KV cache, such as fp8 (default: as configured)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the sizes."""
    sizes = _Sizes(
        model=str(args.model or "the tiny model that kvkeep ships"),
        geometry=KVGeometry.from_config(args.model or _bundled(), dtype=args.dtype, tp=args.tp),
        page_size=args.page_size,
        memory=parse_bytes(args.memory),
    )
    if args.json:
        print(json.dumps(_as_json(sizes)))
        return 0
    print_facts(f"KV of {sizes.model}: {_described(sizes.geometry)}", _rows(sizes))
    return 0


def _bundled() -> Path:
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415 - only without --model

    return bundled_model()


def _as_json(sizes: _Sizes) -> dict[str, object]:
    geometry = sizes.geometry
    return {
        "model": sizes.model,
        "layers": geometry.layers,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "value_dim": geometry.value_dim,
        "latent_dim": geometry.latent_dim,
        "windows": geometry.windows,
        "dtype": geometry.dtype,
        "tp": geometry.tp,
        "page_size": sizes.page_size,
        "memory": sizes.memory,
        "bytes_per_token": geometry.bytes_per_token,
        "bytes_per_page": geometry.bytes_per_page(sizes.page_size),
        "pages": sizes.pages,
        "tokens": sizes.tokens,
        "prompts": {str(length): sizes.prompts(length) for length in _PROMPTS},
    }


def _described(geometry: KVGeometry) -> str:
    if geometry.latent_dim is not None:
        stored = f"a latent of {geometry.latent_dim} + {geometry.rope_dim}"
    else:
        width = str(geometry.head_dim)
        if geometry.value_dim != geometry.head_dim:
            width += f"/{geometry.value_dim}"
        stored = f"{geometry.kv_heads} KV heads × {width}"
    parts = [f"{geometry.layers} layers × {stored}", geometry.dtype]
    if sliding := sum(window is not None for window in geometry.windows):
        parts.append(f"{sliding} layers slide (their pages hold all tokens)")
    if geometry.tp > 1:
        parts.append(f"one of {geometry.tp} ranks")
    return ", ".join(parts)


def _rows(sizes: _Sizes) -> list[tuple[str, str]]:
    geometry = sizes.geometry
    page = format_bytes(geometry.bytes_per_page(sizes.page_size))
    return [
        ("a token", format_bytes(geometry.bytes_per_token)),
        (f"a page of {sizes.page_size} tokens", page),
        (f"pages in {format_bytes(sizes.memory)}", f"{sizes.pages:,}"),
        ("tokens in them", f"{sizes.tokens:,}"),
        *((f"prompts of {length // 1024}k", f"{sizes.prompts(length):,}") for length in _PROMPTS),
    ]
