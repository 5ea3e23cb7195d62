"""``kvkeep size``: the size of a model's KV, and how much of it fits into a memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import (
    add_json,
    add_model_path,
    add_option,
    add_page_size,
    byte_size,
    count,
)
from kvkeep.cli.tables import print_facts, print_table
from kvkeep.core.geometry import KVGeometry, format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from kvkeep.cli.arguments import Commands
    from kvkeep.core.geometry import AttentionShape, LayerGroup

__all__ = ["add_parser", "run"]

_PROMPTS = (8 * 1024, 32 * 1024, 128 * 1024)


@dataclass(frozen=True)
class _Sizes:
    """What fits into ``memory`` bytes; all counts are per tensor-parallel rank."""

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

    @property
    def slides(self) -> bool:
        """Whether some layers need the last tokens of a sequence alone."""
        return any(group.span is not None for group in self.geometry.groups)

    def prompts(self, length: int) -> int:
        """Return how many prompts of ``length`` tokens fit, each in pages of all its tokens."""
        return self.pages // -(-length // self.page_size)

    def of_group(self, group: LayerGroup, length: int) -> int:
        """Return the bytes of one sequence of ``length`` tokens in the layers of ``group``."""
        geometry = self.geometry
        return group.bytes_for(length, geometry.dtype, geometry.tp, page_size=self.page_size)

    def sequence(self, length: int) -> int:
        """Return the bytes of one sequence of ``length`` tokens."""
        return self.geometry.bytes_for(length, page_size=self.page_size)

    def sequences(self, length: int) -> int:
        """Return how many sequences of ``length`` tokens run at once."""
        return self.geometry.sequences_in(self.memory, length, page_size=self.page_size)


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "size",
        help="the size of a model's KV, and how much of it fits into a memory",
        description="Read a model's configuration and print the bytes of a token and of sequences "
        "of 8k, 32k and 128k tokens, for each group of layers that keeps the same (full "
        "attention, windows, chunks, latents, states), and how many sequences run at once in a "
        "memory. No weights are loaded.",
    )
    add_model_path(parser, "local Hugging Face model directory or its config.json")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=byte_size,
        required=True,
        help="memory for KV per GPU, such as 24GiB",
    )
    add_page_size(parser)
    add_option(parser, "--tp RANKS", "tensor-parallel ranks", type=count, default=1)
    parser.add_argument(
        "--dtype",
        help="type of the KV cache, such as fp8 (default: as configured, else that of the weights "
        "beside the file, else bfloat16; it is said which)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the sizes."""
    sizes = _Sizes(
        model=str(args.model or "the tiny model that kvkeep ships"),
        geometry=KVGeometry.from_config(args.model or _bundled(), dtype=args.dtype, tp=args.tp),
        page_size=args.page_size,
        memory=args.memory,
    )
    rows = _facts(sizes)  # raises if not even a page fits
    if args.json:
        print(json.dumps(_as_json(sizes)))
        return 0
    title = f"KV of {sizes.model}: {_described(sizes.geometry)}"
    print_facts("\n".join([title, *(f"  {note}" for note in sizes.geometry.notes)]), rows)
    lengths = [f"{length // 1024}k" for length in _PROMPTS]
    print_table(["bytes of a sequence", "a token", *lengths], _table(sizes))
    return 0


def _bundled() -> Path:
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415 - only without --model

    return bundled_model()


def _as_json(sizes: _Sizes) -> dict[str, object]:
    geometry, plain = sizes.geometry, sizes.geometry.plain
    of_all_layers = {
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "value_dim": geometry.value_dim,
        "latent_dim": geometry.latent_dim,
        "windows": geometry.windows,
    }
    return {
        "model": sizes.model,
        "layers": geometry.layers,
        **{name: value if plain else None for name, value in of_all_layers.items()},
        "dtype": geometry.dtype,
        "notes": geometry.notes,
        "tp": geometry.tp,
        "page_size": sizes.page_size,
        "memory": sizes.memory,
        "bytes_per_token": geometry.bytes_per_token,
        "bytes_per_state": geometry.bytes_per_state,
        "bytes_per_page": geometry.bytes_per_page(sizes.page_size),
        "pages": sizes.pages if plain else None,
        "tokens": sizes.tokens if plain else None,
        "prompts": _by_length(sizes.prompts) if plain else None,
        "groups": [_group_as_json(sizes, group) for group in geometry.groups],
        "bytes": _by_length(sizes.sequence),
        "sequences": _by_length(sizes.sequences),
    }


def _group_as_json(sizes: _Sizes, group: LayerGroup) -> dict[str, object]:
    geometry, shape = sizes.geometry, group.shape
    return {
        "kind": group.kind,
        "layers": group.layers,
        "span": group.span,
        "kv_heads": shape and shape.kv_heads,
        "head_dim": shape and shape.head_dim,
        "value_dim": shape and shape.value_dim,
        "latent_dim": shape and shape.latent_dim,
        "state": [
            {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype}
            for tensor in group.state
        ],
        "grid": group.grid,
        "bytes_per_token": group.bytes_per_token(geometry.dtype, geometry.tp),
        "bytes_per_state": group.bytes_per_state(geometry.tp),
        "bytes": _by_length(partial(sizes.of_group, group)),
    }


def _by_length(count: Callable[[int], int]) -> dict[str, int]:
    return {str(length): count(length) for length in _PROMPTS}


def _described(geometry: KVGeometry) -> str:
    """Return the title: one line for layers that are all alike, else one more for each group."""
    rest = [geometry.dtype]
    if geometry.tp > 1:
        rest.append(f"one of {geometry.tp} ranks")
    first, *others = geometry.groups
    if first.shape is not None and first.span is None and not others:
        layers = f"{geometry.layers} layers × {_shape(first.shape)}"
        return ", ".join([layers, *rest])
    lines = [", ".join([f"{geometry.layers} layers", *rest])]
    lines += [f"  {_label(group)}: {_stored(group)}" for group in geometry.groups]
    return "\n".join(lines)


def _label(group: LayerGroup) -> str:
    span = "" if group.span is None else f" of {group.span:,}"
    return f"{len(group.layers)} × {group.kind}{span}"


def _stored(group: LayerGroup) -> str:
    if group.shape is not None:
        return _shape(group.shape)
    tensors = [
        f"{tensor.name} {' × '.join(map(str, tensor.shape))} {tensor.dtype}"
        for tensor in group.state
    ]
    return ", ".join(tensors)


def _shape(shape: AttentionShape) -> str:
    if shape.latent_dim is not None:
        return f"a latent of {shape.latent_dim} + {shape.head_dim - shape.latent_dim}"
    width = str(shape.head_dim)
    if shape.value_dim != shape.head_dim:
        width += f"/{shape.value_dim}"
    return f"{shape.kv_heads} KV heads × {width}"


def _facts(sizes: _Sizes) -> list[tuple[str, str]]:
    geometry = sizes.geometry
    rows = [("a token", format_bytes(geometry.bytes_per_token))]
    if geometry.bytes_per_state:
        rows.append(("the states of a sequence", format_bytes(geometry.bytes_per_state)))
    if geometry.plain:
        page = format_bytes(geometry.bytes_per_page(sizes.page_size))
        rows += [
            (f"a page of {sizes.page_size} tokens", page),
            (f"pages in {format_bytes(sizes.memory)}", f"{sizes.pages:,}"),
            ("tokens in them", f"{sizes.tokens:,}"),
        ]
    return rows


def _table(sizes: _Sizes) -> list[list[str]]:
    """Return a row of bytes for each group and their sum, and how many sequences run at once."""
    geometry = sizes.geometry
    rows = []
    for group in geometry.groups:
        token = group.bytes_per_token(geometry.dtype, geometry.tp)
        taken = [format_bytes(sizes.of_group(group, length)) for length in _PROMPTS]
        rows.append([_label(group), format_bytes(token) if token else "–", *taken])
    if len(rows) > 1:
        taken = [format_bytes(sizes.sequence(length)) for length in _PROMPTS]
        rows.append(["together", format_bytes(geometry.bytes_per_token), *taken])
    at_once = [f"{sizes.sequences(length):,}" for length in _PROMPTS]
    rows.append([f"at once in {format_bytes(sizes.memory)}", "", *at_once])
    if geometry.plain and sizes.slides:
        whole = [f"{sizes.prompts(length):,}" for length in _PROMPTS]
        rows.append(["at once, windows kept whole", "", *whole])
    return rows
