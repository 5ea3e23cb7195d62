"""`with_key`: places the prompts of one key at one instance, where that costs nothing."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.serve.router.router import Score

__all__ = ["with_key"]

_SLACK_S = 1.0
"""Seconds that a prompt waits at the least for the instance of its key."""


def with_key(scores: Sequence[Score], key: str, home: str = "") -> Score:
    """Return the score of the place to choose, of ``scores``, best first.

    Each key has an order of all instances (rendezvous hashing), so it needs no memory, and only the
    keys of an instance that is down move. The first of ``scores`` in this order is chosen, unless
    another place has more of the prompt cached, or would begin sooner by more than the prompt's
    prefill. ``home``, if it is among them, takes the place of the first: the instance that is known
    to have answered the conversation before.
    """
    best = scores[0]
    names = {score.place.instance for score in scores}
    if home not in names:
        if not key:
            return best
        home = max(names, key=lambda name: _rank(name, key))
    for score in scores:
        if score.place.instance == home and score.prefill_s <= best.prefill_s:
            late_s = score.wait_s - best.wait_s
            return score if late_s <= max(best.prefill_s, _SLACK_S) else best
    return best


def _rank(instance: str, key: str) -> bytes:
    text = f"{instance}\n{key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()
