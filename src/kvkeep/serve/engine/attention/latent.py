"""Attention over latents: keys and values that a linear map makes of one stored vector.

A layer with latent attention (MLA, of DeepSeek-V2, arXiv:2405.04434) stores one vector a token, the
latent and a rotary key, from which it expands the keys and values of all heads. There are two ways
to attend over the stored latents:

- *expanded*: gathered vectors are expanded first. For pieces of many tokens, which use each key
  many times.
- *absorbed*: queries are mapped to the stored vectors, which then serve as keys and values of one
  KV head, and the output is mapped to values. For short pieces: nothing is expanded.

Both are equal but for rounding, as the maps are linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LatentMaps"]


@dataclass(frozen=True, slots=True, eq=False)
class LatentMaps:
    """The linear maps of one layer from stored vectors.

    ``keys`` is [heads, stored, key dim], from the whole stored vector; ``values`` [heads, latent,
    value dim], from the latent, its leading part.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def expand(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [tokens, heads, dim] of the vectors ``stored`` [tokens, width]."""
        heads, latent, _ = self.values.shape
        keys = torch.matmul(stored, self.keys)
        values = torch.matmul(stored[:, :latent], self.values)
        assert len(keys) == heads
        return keys.transpose(0, 1), values.transpose(0, 1)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries for stored vectors [tokens, heads, stored]; [tokens, heads, dim]."""
        return torch.matmul(query.transpose(0, 1), self.keys.transpose(1, 2)).transpose(0, 1)

    def value(self, attended: torch.Tensor) -> torch.Tensor:
        """Return attention [tokens, heads, dim] from that over latents [tokens, heads, latent]."""
        return torch.matmul(attended.transpose(0, 1), self.values).transpose(0, 1)
