"""The rows of a batch, and the arguments of ``generate``: what is checked and what is refused."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue, require
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import as_tokens, common_length
from kvkeep.integrations.transformers_caches import check_fits
from kvkeep.integrations.transformers_model import takes_positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import Cache, PreTrainedModel

    from kvkeep.core.tokens import TokenArray

__all__ = [
    "PASS_TOKENS",
    "Answered",
    "GenerateSettings",
    "Pass",
    "Rows",
    "SharedRows",
    "passes",
    "rows_of",
    "shared_prefixes",
    "tensor_of",
]

PASS_TOKENS: Final = 64
"""Fixed cost of a forward pass (reading weights, starting kernels), in tokens."""


class Rows(NamedTuple):
    """The texts of a batch, and their columns.

    ``ids``, ``mask`` and ``positions`` are [rows, columns] on the CPU, as `generate` makes them;
    ``texts`` are the rows without their ``pads``.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    texts: tuple[TokenArray, ...]
    pads: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Columns of the batch: tokens of its longest text, and pads that all rows have."""
        return int(self.ids.shape[1])

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts))


def rows_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Rows:
    """Return the rows of ``input_ids``, [rows, tokens] or [tokens]; no mask: all is text.

    Raises:
        InvalidValue: no tensor, a wrong shape, a row without text, or pads that are not on the
            left.
    """
    ids = tensor_of(input_ids, "input_ids").detach().cpu()
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or not ids.numel():
        raise InvalidValue(
            f"input_ids are shaped {tuple(input_ids.shape)}; [rows, tokens] is needed, with at "
            "least one token"
        )
    if attention_mask is None:
        mask = torch.ones_like(ids)
    else:
        mask = tensor_of(attention_mask, "attention_mask").detach().cpu()
        mask = mask[None] if mask.ndim == 1 else mask
        if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
            raise InvalidValue(
                f"attention_mask is shaped {tuple(attention_mask.shape)} and input_ids "
                f"{tuple(input_ids.shape)}; it needs a 1 for each token and a 0 for each pad"
            )
        mask = mask.long()
        _check_left(mask)
    pads = tuple(int(count) for count in (mask == 0).sum(1))
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    texts = tuple(as_tokens(row[pad:].numpy()) for row, pad in zip(ids, pads, strict=True))
    return Rows(ids, mask, positions, texts, pads)


def tensor_of(given: object, name: str) -> torch.Tensor:
    """Return the argument ``given``, called ``name``; raise `InvalidValue` if it is no tensor."""
    if isinstance(given, torch.Tensor):
        return given
    raise InvalidValue(
        f"{name} is {type(given).__name__}; it is a tensor [rows, tokens], as a tokenizer gives it "
        "with return_tensors='pt': generate(**tokenizer(...)), or its input_ids"
    )


def _check_left(mask: torch.Tensor) -> None:
    """Raise `InvalidValue` unless each row is pads, then text."""
    for number, row in enumerate(mask):
        if not bool(row.any()):
            raise InvalidValue(f"row {number} is all padding; leave it out")
        if not row[-1]:
            raise InvalidValue(
                f"row {number} is padded on the right, where the answer begins; let the tokenizer "
                "pad on the left: padding_side='left'"
            )
        if bool((row[1:] < row[:-1]).any()):
            raise InvalidValue(
                f"row {number} has zeros of attention_mask inside its text; only pads on the left "
                "can be masked"
            )


class SharedRows(NamedTuple):
    """Some rows, and the number of their first tokens that are equal."""

    rows: tuple[int, ...]
    tokens: int


def shared_prefixes(texts: Sequence[TokenArray]) -> tuple[list[int], list[SharedRows]]:
    """Return the rows sorted by text, and the prefixes that several rows share, shortest first.

    These are the inner nodes of the tree of all rows. The last token of a row is never shared: it
    is computed for its logits. O(rows · tokens), and O(rows²) if all rows share something.
    """
    order = sorted(range(len(texts)), key=lambda row: texts[row].tobytes())
    common = [common_length(texts[left][:-1], texts[right][:-1]) for left, right in pairwise(order)]
    found: set[SharedRows] = set()
    for at, tokens in enumerate(common):
        low, high = at, at + 1
        while low and common[low - 1] >= tokens:
            low -= 1
        while high < len(common) and common[high] >= tokens:
            high += 1
        if tokens:
            found.add(SharedRows(tuple(order[low : high + 1]), tokens))
    return order, sorted(found, key=lambda shared: shared.tokens)


class Pass(NamedTuple):
    """One forward pass: columns ``start`` … ``stop - 1`` of ``rows``."""

    rows: tuple[int, ...]
    start: int
    stop: int


def passes(levels: Sequence[int], columns: int) -> list[Pass]:
    """Return the passes that compute rows, known up to ``levels``, up to ``columns``.

    Rows with less known KV begin, and others join later. A row may join earlier than necessary if
    that saves a pass: the sum of all columns computed, plus `PASS_TOKENS` for each pass, is
    minimal. O(rows²).
    """
    ordered = sorted(levels)
    starts = sorted({level for level in levels if level < columns})
    best: dict[int, tuple[int, int]] = {columns: (0, columns)}  # column → cost from there, stop
    for start in reversed(starts):
        best[start] = min(
            (PASS_TOKENS + (stop - start) * bisect_left(ordered, stop) + best[stop][0], stop)
            for stop in best
        )
    found = []
    start = starts[0] if starts else columns
    while start < columns:
        stop = best[start][1]
        rows = tuple(row for row, level in enumerate(levels) if level < stop)
        found.append(Pass(rows, start, stop))
        start = stop
    return found


_OWN_CACHE: Final = "it does not continue from a loaded cache; leave it out"
# Settings of `generate` with their own use of the cache, and the advice for each.
_REFUSED: Final[dict[str, str]] = {
    "inputs_embeds": "the store finds KV by token ids; pass input_ids",
    "custom_generate": "use load() and save() around it",
    "token_healing": "it takes back tokens whose KV may be loaded already",
    "penalty_alpha": _OWN_CACHE,
    # Transformers 5.23 computes the whole prompt again behind a cache that has its beginning.
    "assistant_model": _OWN_CACHE,
    "assistant_early_exit": _OWN_CACHE,
    "prompt_lookup_num_tokens": _OWN_CACHE,
    "use_mtp": _OWN_CACHE,
}
# Settings of `generate` that compute several answers side by side.
_COPIES: Final = ("num_beams", "num_return_sequences")
# Settings that may be tensors and do not change the KV of the text.
_TENSORS: Final = {"eos_token_id", "pad_token_id", "bos_token_id", "negative_prompt_ids",
                   "negative_prompt_attention_mask"}  # fmt: skip
# Values in generation configurations of older models; a fitting cache is chosen anyway.
_NO_CHOICE: Final = {None, "dynamic", "hybrid"}
# Outputs that have all tokens of the prompt, if a dictionary is returned.
_OF_PROMPT: Final = ("output_hidden_states", "output_attentions")
_DEFAULT_NEW_TOKENS: Final = 20  # the default of Transformers


class Answered(NamedTuple):
    """A row of what ``generate`` returned.

    Attributes:
        row: its number.
        pad: columns of padding before its first token.
        text: its prompt and answer, up to the token that ended the answer.
        prompt: tokens of the prompt.
        ended: how the answer ended.
    """

    row: int
    pad: int
    text: TokenArray
    prompt: int
    ended: Ended


class GenerateSettings:
    """The arguments of one `generate`, checked.

    Attributes:
        rows: the prompts.
        copies: answers computed side by side for each prompt: beams or samples.
        passed: the arguments for ``model.generate``, except the cache.
        cache: the empty cache that the user passed or requested; None: no preference.

    Raises:
        InvalidValue: prompts or settings are not supported, with the reason.
    """

    def __init__(
        self, model: PreTrainedModel, inputs: torch.Tensor | None, given: dict[str, Any]
    ) -> None:
        self._model = model
        self.passed = dict(given)
        self.rows = self._rows(inputs)
        self._check()
        self.copies: int = max(self.value(name) or 1 for name in _COPIES)
        self.cache = self._cache()

    def value(self, name: str) -> Any:
        """Return what ``generate`` takes for ``name``: the argument, or a configured value."""
        if name in self.passed:
            return self.passed[name]
        given = getattr(self.passed.get("generation_config"), name, None)
        return getattr(self._model.generation_config, name, None) if given is None else given

    @property
    def whole(self) -> bool:
        """Whether the output has more of the prompt than its KV, so that all is to be computed."""
        asked = any(self.value(name) for name in _OF_PROMPT)
        return bool(asked and self.value("return_dict_in_generate"))

    @property
    def ends(self) -> set[int]:
        """The tokens that end an answer; later tokens of a row are padding."""
        ends = self.value("eos_token_id")
        if ends is None:
            return set()
        return set(torch.as_tensor(ends).flatten().tolist())

    def answers(self, sequences: torch.Tensor) -> Iterator[Answered]:
        """Yield the answers in ``sequences``, shaped [rows, columns] as ``generate`` returns them.

        Only for one answer a prompt.
        """
        ends, columns = self.ends, self.rows.columns
        for row, (sequence, pad) in enumerate(zip(sequences.cpu(), self.rows.pads, strict=True)):
            answer = sequence[columns:].tolist()
            length = next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))
            last = answer[length - 1] if length else None
            ended = Ended(f"stop {last}" if last in ends else "length")
            yield Answered(row, pad, sequence[pad : columns + length].numpy(), columns - pad, ended)

    def _rows(self, inputs: torch.Tensor | None) -> Rows:
        """Return the prompts; put them and their mask into `passed` as tensors."""
        named: torch.Tensor | None = self.passed.pop("input_ids", None)
        ids = inputs if named is None else named
        if ids is None or (named is not None and inputs is not None):
            raise InvalidValue("generate needs its prompts: input_ids, as a tokenizer gives them")
        if tensor_of(ids, "input_ids").ndim != 2:
            raise InvalidValue(f"input_ids are shaped {tuple(ids.shape)}; [rows, tokens] is needed")
        mask = self.passed.get("attention_mask")
        pad = self.value("pad_token_id")
        if mask is None and len(ids) > 1 and pad is not None and bool((ids == pad).any()):
            raise InvalidValue(
                f"there are pads (token {pad}) among input_ids and no attention_mask; pass the "
                "tokenizer's attention_mask, or ones if they are text"
            )
        rows = rows_of(ids, mask)
        if any(rows.pads) and not takes_positions(self._model):
            raise InvalidValue(
                f"{type(self._model).__name__} takes no position_ids, so that the KV of its texts "
                "depends on their padding; give prompts of one length, or one at a time"
            )
        self.passed["inputs"] = ids
        self.passed["attention_mask"] = rows.mask.to(ids.device)
        return rows

    def _check(self) -> None:
        """Refuse settings that change the KV of tokens, or with which loaded KV is ignored."""
        for name, why in _REFUSED.items():
            value = self.value(name)
            if value is not None and value is not False:
                raise InvalidValue(f"generate does not take {name}: {why}")
        if self.value("use_cache") is False:
            raise InvalidValue("use_cache is False; then there is no KV to store")
        others = [
            name
            for name, value in self.passed.items()
            if isinstance(value, torch.Tensor)
            and name not in {"inputs", "attention_mask", *_TENSORS}
        ]
        if others:
            raise InvalidValue(
                f"{', '.join(others)} would change the KV of tokens that the store finds by their "
                "ids alone; generate with input_ids, or without the store"
            )

    def _cache(self) -> Cache | None:
        """Return the cache that the user passed or requested."""
        cache: Cache | None = self.passed.pop("past_key_values", None)
        kind = self.value("cache_implementation")
        if kind not in {*_NO_CHOICE, "static"}:
            raise InvalidValue(
                f"cache_implementation {kind!r} is not supported: its keys and values cannot be "
                "read, or are not as computed; 'static' and 'dynamic' are supported"
            )
        if cache is not None:
            check_fits(cache, self.rows.columns)
        elif kind == "static":
            cache = self._static()
        if kind is not None:  # `generate` refuses both, and is given a cache
            self.passed["cache_implementation"] = None
        return cache

    def _static(self) -> Cache:
        """Return a static cache of the length ``generate`` would choose."""
        transformers = require("transformers", "transformers")
        columns = self.rows.columns
        if (new := self.value("max_new_tokens")) is not None:
            length = columns + new
        else:
            length = self.value("max_length") or columns + _DEFAULT_NEW_TOKENS
        length = max(length, columns, self.value("max_cache_len") or 0)
        cache: Cache = transformers.StaticCache(self._model.config, max_cache_len=length)
        return cache
