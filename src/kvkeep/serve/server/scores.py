"""Log probabilities in the formats of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from kvkeep.serve.server.schemas.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    ScoredToken,
    TokenScore,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.serve.engine import Tokenizer, TokenLogprob

__all__ = ["Offsets", "chat_logprobs", "completion_logprobs"]

_IMPOSSIBLE = -9999.0


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return tokens with their bytes, since a token may be a part of a character."""
    return ChatLogprobs(
        content=[
            ScoredToken(
                **_score(tokenizer, score.token, score.logprob).model_dump(),
                top_logprobs=[_score(tokenizer, token, logprob) for token, logprob in score.top],
            )
            for score in scores
        ]
    )


def _score(tokenizer: Tokenizer, token: int, logprob: float) -> TokenScore:
    data = tokenizer.token_bytes(token)
    return TokenScore(
        token=data.decode(errors="replace"), logprob=_finite(logprob), bytes=list(data)
    )


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by OpenAI's -9999."""
    return max(logprob, _IMPOSSIBLE)


class Offsets:
    """Computes where each token of one answer begins in its text, in characters.

    A token that begins inside a character has the offset of that character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def take(self, token: bytes) -> int:
        """Return the offset of the next token."""
        begins = self._characters
        self._characters += len(self._decoder.decode(token))
        return begins


def completion_logprobs(
    tokenizer: Tokenizer, scores: Iterable[TokenLogprob], offsets: Offsets
) -> CompletionLogprobs:
    """Return lists with one entry per token; ``offsets`` belongs to the same answer."""
    words = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for score in scores:
        words.tokens.append(_name(tokenizer, score.token))
        words.token_logprobs.append(_finite(score.logprob))
        words.top_logprobs.append(
            {_name(tokenizer, token): _finite(logprob) for token, logprob in score.top}
        )
        words.text_offset.append(offsets.take(tokenizer.token_bytes(score.token)))
    return words


def _name(tokenizer: Tokenizer, token: int) -> str:
    r"""Return a token's text, or ``bytes:\xe2`` if it is not whole characters."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
