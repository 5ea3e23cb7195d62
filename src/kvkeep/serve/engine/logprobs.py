"""Log probabilities of chosen tokens, and of the likeliest tokens in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvkeep.serve.engine.sampling import likeliest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TokenLogprob", "logprobs_of"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log probability, and ``top``: the likeliest (token, log probability).

    ``top`` is sorted by probability, equals by id; the token itself is in it only if it is among
    the likeliest.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Return the log probability of each row's token, from ``logits`` [rows, vocabulary].

    ``tops`` are how many of the likeliest tokens each row reports, at most the vocabulary; a row
    with None costs nothing and gives None. The distribution is the model's own, in float32, before
    temperature, penalties and biases, as in OpenAI's API and vLLM.
    """
    found: list[TokenLogprob | None] = [None] * len(tops)
    wanted = [row for row, top in enumerate(tops) if top is not None]
    if not wanted:
        return found
    scores = logits[wanted].log_softmax(-1, dtype=torch.float32)
    mine = torch.tensor([[tokens[row]] for row in wanted], device=scores.device)
    width = min(max(tops[row] or 0 for row in wanted), scores.shape[-1])
    ids = likeliest(scores, width) if width else mine[:, :0]
    values: list[list[float]] = scores.gather(-1, torch.cat((mine, ids), -1)).tolist()
    names: list[list[int]] = ids.tolist()
    for row, (own, *rest), its_ids in zip(wanted, values, names, strict=True):
        top = tuple(zip(its_ids, rest, strict=True))[: tops[row]]
        found[row] = TokenLogprob(tokens[row], own, top)
    return found
