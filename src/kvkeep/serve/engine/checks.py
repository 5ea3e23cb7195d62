"""`RequestChecks`: validates a request before an engine queues it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.serve.engine.limits import Limits
    from kvkeep.serve.engine.params import SamplingParams
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.text import Tokenizer

__all__ = ["RequestChecks"]


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Checks prompts and parameters against the model, the pool and the limits of an engine."""

    runner: Runner
    tokenizer: Tokenizer | None
    limits: Limits

    def tokens(self, prompt: str | TokensLike) -> TokenArray:
        """Return a copy of the tokens of ``prompt``, whose memory may change while it waits.

        Raises `InvalidValue` if the model cannot compute them.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidValue("text prompts need a tokenizer; give the engine one, or tokens")
            prompt = self.tokenizer.encode(prompt)
        tokens = as_tokens(prompt).copy()
        runner = self.runner
        if not len(tokens):
            raise InvalidValue("it has no tokens; a prompt has at least one")
        pool = runner.num_pages * runner.page_size
        if len(tokens) > pool:
            raise InvalidValue(
                f"it has {len(tokens)} tokens and the pool holds {pool} "
                f"({runner.num_pages} pages of {runner.page_size}); give it more memory"
            )
        if len(tokens) > runner.max_tokens:
            raise InvalidValue(
                f"it has {len(tokens)} tokens, and the model is made for at most "
                f"{runner.max_tokens}"
            )
        if tokens.max() >= runner.vocabulary:
            raise InvalidValue(
                f"it has token {tokens.max()}; the model knows 0 … {runner.vocabulary - 1}"
            )
        return tokens

    def params(self, params: SamplingParams) -> None:
        """Raise `InvalidValue` for parameters that this engine cannot follow."""
        if self.tokenizer is None and params.stop:
            raise InvalidValue("stop texts need a tokenizer; give the engine one")
        if params.n > self.limits.max_running:
            raise InvalidValue(
                f"{params.n} answers are more than run at once ({self.limits.max_running}); "
                "ask for fewer, or raise max_running"
            )
        for token, _ in params.logit_bias:
            if token >= self.runner.vocabulary:
                raise InvalidValue(
                    f"logit_bias has token {token}; the model knows 0 … "
                    f"{self.runner.vocabulary - 1}"
                )
