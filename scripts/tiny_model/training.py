"""The training loop: packed rows, growing lengths, Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from tiny_model.dialogues import epoch, is_favourite
from tiny_model.loss import next_token_loss
from tiny_model.tokens import encode_dialogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedTokenizerFast

    from tiny_model.corpus import Entry
    from tiny_model.kinds import Model

__all__ = ["PHASES", "Phase", "Progress", "Recipe", "evaluate", "train"]


class Phase(NamedTuple):
    """Until this share of the run, rows of ``row_tokens`` tokens, ``rows`` of them a step.

    ``favourites`` narrows the corpus to the entries to be learned by heart; ``rope_base`` is the
    base of the rotary embedding.
    """

    until: float
    row_tokens: int
    rows: int
    favourites: bool = False
    rope_base: float = 10_000.0


# Short rows of everything teach the words cheaply; then the favourites at growing lengths. A
# larger rope base at the end stretches what was learned to prompts of several thousand tokens:
# with the first base the loss at 3,400 tokens is ten times that at 1,000.
PHASES = (
    Phase(0.45, 256, 8),
    Phase(0.7, 512, 4, favourites=True),
    Phase(0.8, 4096, 1, favourites=True),
    Phase(0.88, 1024, 3, favourites=True),
    Phase(1.0, 2048, 1, favourites=True, rope_base=32_000.0),
)
CHARACTERS_PER_TOKEN = 3.2  # of this corpus, measured
WARMUP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parameters of a run; it ends at ``steps`` or after ``minutes``, whichever is first.

    ``share`` is where it begins: above zero for a model that has come so far already.
    """

    seed: int
    steps: int
    minutes: float
    share: float
    phases: tuple[Phase, ...]
    muon_rate: float = 8e-3
    adamw_rate: float = 4e-3


@dataclass(frozen=True, slots=True)
class Progress:
    """One step done: its loss in nats a token, and how far the run is (share of the whole)."""

    step: int = 0
    share: float = 0.0
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    row_tokens: int = 0


def train(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    entries: Sequence[Entry],
    recipe: Recipe,
    report: Callable[[Progress], None],
) -> None:
    """Train ``model`` in place; ``report`` is called after every step.

    With the run bounded by ``steps`` alone the result depends on the seed only (and on the
    arithmetic of the machine); bounded by ``minutes`` it depends on the machine's speed too.
    """
    random = Random(recipe.seed)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = torch.optim.Muon(
        matrices, lr=recipe.muon_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.perf_counter()
    share, tokens = recipe.share, 0
    streams: dict[Phase, Iterator[torch.Tensor]] = {}
    model.train()
    for step in range(recipe.steps):
        phase = next(p for p in recipe.phases if share < p.until)
        if phase not in streams:
            chosen = [e for e in entries if is_favourite(e) or not phase.favourites]
            streams[phase] = _rows(tokenizer, chosen, random, phase.row_tokens)
            _set_rope_base(model, phase.rope_base)
        batch = torch.stack(list(itertools.islice(streams[phase], phase.rows)))
        rate = _rate(step, share)
        for optimizer, peak in ((muon, recipe.muon_rate), (adamw, recipe.adamw_rate)):
            optimizer.param_groups[0]["lr"] = peak * rate
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad(set_to_none=True)
        tokens += batch.numel() - len(batch)
        seconds = time.perf_counter() - started
        done = max((step + 1) / recipe.steps, seconds / (60 * recipe.minutes))
        share = recipe.share + (1 - recipe.share) * done
        report(Progress(step + 1, share, float(loss.detach()), tokens, seconds, phase.row_tokens))
        if share >= 1:
            break
    model.eval()  # type: ignore[no-untyped-call]


@torch.no_grad()
def evaluate(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    entries: Sequence[Entry],
    seed: int,
) -> float:
    """The mean loss in nats a token over one epoch of ``entries``, in rows of 512 tokens."""
    dialogues = epoch(entries, Random(seed), int(500 * CHARACTERS_PER_TOKEN))
    losses, counts = [], []
    for messages in dialogues:
        tokens = encode_dialogue(tokenizer, messages)[:513]
        losses.append(float(_loss(model, torch.tensor([tokens]))) * len(tokens))
        counts.append(len(tokens))
    return math.fsum(losses) / sum(counts)


def _loss(model: Model, batch: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy over rows of ``row_tokens + 1`` tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
    embedding = model.model.embed_tokens.weight
    return next_token_loss(hidden.float().flatten(0, 1), embedding, batch[:, 1:].flatten())


def _set_rope_base(model: Model, base: float) -> None:
    """Set the RoPE base to ``base``, also for directories written later."""
    model.config.rope_parameters = {**(model.config.rope_parameters or {}), "rope_theta": base}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def _rate(step: int, share: float) -> float:
    """The learning rate's factor: a short warm-up, a plateau, then a straight line to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, max(0.0, (1 - share) / 0.6))


def _rows(
    tokenizer: PreTrainedTokenizerFast, entries: Sequence[Entry], random: Random, row_tokens: int
) -> Iterator[torch.Tensor]:
    """Endless rows of ``row_tokens + 1`` tokens; each starts where a dialogue starts.

    A dialogue that does not fit waits for the next row, so that few questions are cut off from
    their documents; when several wait, the row is filled with the head of one.
    """
    length = row_tokens + 1
    waiting: list[list[int]] = []
    row: list[int] = []
    while True:
        for messages in epoch(entries, random, int(0.9 * row_tokens * CHARACTERS_PER_TOKEN)):
            tokens = encode_dialogue(tokenizer, messages)
            if len(row) + len(tokens) <= length:
                row += tokens
            else:
                waiting.append(tokens)
            while len(row) == length or len(waiting) > 6:
                row += waiting.pop()[: length - len(row)] if len(row) < length else []
                yield torch.tensor(row)
                row = waiting.pop(0)[:length] if waiting else []
