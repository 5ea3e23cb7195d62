"""Public prefixes in vLLM: blocks that all cache salts share, by hashes that no salt changes.

vLLM's hash of a block covers the request's ``cache_salt``, from the first block on. The leading
blocks of a prompt that begins with all whole blocks of a declared prefix have other hashes here,
chained from their tokens alone. The blocks behind them keep vLLM's, which cover the salt and all
tokens.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.errors import InvalidValue, require
from kvkeep.core.extras import Extra
from kvkeep.core.keys import Namespace, chain_keys, root_key
from kvkeep.core.public import PublicPrefixes, public_namespace, read_prefixes
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["PrefixTexts", "PublicBlocks", "prefixes_in"]

_LOG = logging.getLogger("kvkeep.vllm")
# The namespace of the engine's KV is that of its store: this one says that the blocks are public.
_ROOT = root_key(public_namespace(Namespace()))


class PrefixTexts:
    """A `kvkeep.core.public.PrefixTokenizer` from a tokenizer of Transformers.

    ``load`` returns it, None if the engine has none, and is called when it is first needed. Chats
    are rendered by the tokenizer's own template: an engine that is given another one must be told
    the token ids.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._loaded: Any = None

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = self._load()
            if self._loaded is None:
                raise InvalidValue("the engine has no tokenizer; give lists of token ids")
        return self._loaded

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the model's start token if it has one."""
        return self._encode(text, special=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, ready for the model's answer."""
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidValue("the tokenizer has no chat template; give lists of token ids")
        template_error = require("jinja2", "transformers").TemplateError
        try:
            text = tokenizer.apply_chat_template(
                [dict(turn) for turn in messages], tokenize=False, add_generation_prompt=True
            )
        except (template_error, ValueError, TypeError, KeyError) as error:
            raise InvalidValue(f"the model's chat template refuses this: {error}") from error
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        except (TypeError, ValueError) as error:  # half of a character, as "\ud800"
            raise InvalidValue(f"the model's tokenizer refuses this text: {error}") from error
        return found


def prefixes_in(file: str, vllm_config: VllmConfig, block_tokens: int) -> PublicPrefixes:
    """Return the prefixes in ``file``, of which vLLM's tokenizer makes tokens; empty: none.

    Logs how many have a whole block of ``block_tokens`` tokens: others are not shared.

    Raises:
        InvalidValue: the file cannot be read, or a line is wrong.
    """
    if not file:
        return PublicPrefixes()
    rows = read_prefixes(Path(file), PrefixTexts(partial(_tokenizer_of, vllm_config)))
    short = sum(len(row) < block_tokens for row in rows)
    _LOG.info("kvkeep stores %d public prefixes once for all salts", len(rows) - short)
    if short:
        _LOG.warning(
            "%d of the public prefixes in %s are shorter than a block of %d tokens, and are not "
            "shared", short, file, block_tokens,
        )  # fmt: skip
    return PublicPrefixes(rows)


class PublicBlocks:
    """The hashes of leading blocks in public prefixes, in blocks of ``block_tokens`` tokens.

    Thread safety: none; it belongs to the scheduler's thread. Cost: nothing without prefixes; with
    some, 0.1 µs for each token of a request, up to the longest prefix, and 0.5 µs a public block.
    """

    def __init__(self, prefixes: PublicPrefixes, block_tokens: int) -> None:
        self._prefixes = prefixes
        self._size = block_tokens
        self._longest = max(map(len, prefixes.rows), default=0) // TOKEN_BYTES

    def hashes(self, request: Request) -> Sequence[bytes]:
        """Return the hashes of the request's public blocks: of its prompt's first ones, or none.

        Blocks with generated tokens, images or embeddings are private.
        """
        prompt = request.prompt_token_ids
        if not self._longest or prompt is None or request.prompt_embeds is not None:
            return ()
        row = np.array(prompt[: self._longest], np.int32)
        starts = [feature.mm_position.offset for feature in request.mm_features or ()]
        extras = (Extra(min(starts), b""),) if starts else ()
        public = self._prefixes.length(row, self._size, extras)
        return chain_keys(_ROOT, row[:public].tobytes(), self._size * TOKEN_BYTES)

    def renamed(self, request: Request, hashed_tokens: int) -> dict[bytes, bytes]:
        """Return the same hashes by vLLM's, each of which is of ``hashed_tokens`` tokens."""
        step, theirs = self._size // hashed_tokens, request.block_hashes
        ends = theirs[step - 1 :: step]
        return {bytes(end): own for end, own in zip(ends, self.hashes(request), strict=False)}


def _tokenizer_of(vllm_config: VllmConfig) -> Any:
    """Return vLLM's tokenizer; None if it has none."""
    from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415

    model = vllm_config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
