"""`fit_basis`: fits a basis of the codec `transform` to a model of Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.errors import InvalidValue, reason, require, whole

require("torch", "transformers")  # first, so that the error names the extra to install

import torch  # noqa: E402

from kvkeep.core.geometry import download_hint  # noqa: E402
from kvkeep.core.pages.device import pick_device  # noqa: E402
from kvkeep.store.codecs.base import BlockShape  # noqa: E402
from kvkeep.store.codecs.basis_fit import BasisFit  # noqa: E402
from kvkeep.store.codecs.transform import TransformCodec  # noqa: E402
from kvkeep.store.identity import model_identity  # noqa: E402

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvkeep.store.codecs.base import Codec
    from kvkeep.store.codecs.basis import Basis

__all__ = ["FittedBasis", "Prompts", "fit_basis", "fit_basis_of", "sum_up"]

CONTEXT, FOLLOWING = 1024, 256
"""Tokens of a prompt whose KV is coded, and tokens behind it that it is judged by."""

_BLOCK = 256  # tokens
_DRAWS = 8  # of each prompt
_JUDGED = 0.2  # of the prompts: the others are fitted
_ROUNDS = 3
_MARGIN = 0.9  # of the nats allowed, aimed at

KV = list[tuple["Tensor", "Tensor"]]
"""K and V of each layer, [1, heads, tokens, dim]."""


@dataclass(frozen=True, slots=True)
class FittedBasis:
    """A basis, and what it gains and costs on text that it was not fitted to.

    Attributes:
        basis: to be saved.
        ratio: bytes of bfloat16 KV for each encoded byte.
        nats: Kullback-Leibler divergence of the next token's distribution, nats a token.
    """

    basis: Basis
    ratio: float
    nats: float


class Prompts:
    """Prompts of `CONTEXT` tokens, their KV as ``model`` computes it, and what follows them.

    ``ids`` [tokens] are one text. Keys and values are rounded to bfloat16, as they are stored.

    Raises:
        InvalidValue: the text is shorter than a prompt, or the model's layers do not keep the keys
            and values of every token.
    """

    def __init__(self, model: Any, ids: Tensor, *, context: int = CONTEXT) -> None:
        step = context + FOLLOWING
        if len(ids) < step:
            raise InvalidValue(f"the text has {len(ids)} tokens; at least {step} are needed")
        self._model = model
        self._pieces = [ids[at : at + step][None] for at in range(0, len(ids) - step + 1, step)]
        self._context = context
        self.speeds = _speeds(model)
        self.parts = tuple((part.shape[1], part.shape[3]) for pair in self.kv(0) for part in pair)
        self.rotated = tuple(range(0, len(self.parts), 2)) if self._turned_back_vary_less() else ()
        if not self.rotated:
            self.speeds = np.empty(0)

    def __len__(self) -> int:
        return len(self._pieces)

    @torch.no_grad()
    def kv(self, prompt: int) -> KV:
        """Return the KV of a prompt, in values of bfloat16."""
        ids = self._pieces[prompt][:, : self._context].to(self._model.device)
        cache = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        found = []
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.shape[2] != self._context:
                raise InvalidValue(
                    f"a basis is fitted to layers that keep K and V of every token; this model has "
                    f"{type(layer).__name__}"
                )
            found.append((keys.bfloat16().to(keys.dtype), values.bfloat16().to(keys.dtype)))
        return found

    def predictions(self, prompt: int, kv: KV) -> Tensor:
        """Return log probabilities [following, vocabulary] behind a prompt with this KV."""
        from transformers import DynamicCache  # noqa: PLC0415 - seconds

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(kv):
            cache.update(keys, values, layer)
        ids = self._pieces[prompt][:, self._context :].to(self._model.device)
        logits: Tensor = self._model(ids, past_key_values=cache).logits[0]
        return logits.float().log_softmax(-1)

    def gradients(self, prompt: int, kv: KV) -> KV:
        """Return gradients of the summed log probabilities of tokens drawn from the predictions."""
        leaves = [tuple(one.clone().requires_grad_() for one in pair) for pair in kv]
        predicted = self.predictions(prompt, leaves)  # type: ignore[arg-type]
        drawn = torch.multinomial(predicted.detach().exp(), 1)
        flat = [one for pair in leaves for one in pair]
        found = torch.autograd.grad(predicted.gather(-1, drawn).sum(), flat)
        return list(zip(found[::2], found[1::2], strict=True))

    @torch.no_grad()
    def measure(self, codec: Codec, prompts: Sequence[int]) -> tuple[float, float]:
        """Return (bytes of bfloat16 for each encoded byte, nats a token) of ``codec``."""
        nats, raw_bytes, coded_bytes = [], 0, 0
        for prompt in prompts:
            kv = self.kv(prompt)
            exact = self.predictions(prompt, kv).double()
            raw = self.blocks(kv)
            back = []
            for block in raw:
                encoded = memoryview(bytearray(codec.bound(len(block))))
                size = codec.encode(memoryview(block), encoded, b"")
                decoded = bytearray(len(block))
                codec.decode(encoded[:size], memoryview(decoded), b"")
                back.append(decoded)
                raw_bytes, coded_bytes = raw_bytes + len(block), coded_bytes + size
            got = self.predictions(prompt, self._kv_of(back, kv)).double()
            nats.append(float((exact.exp() * (exact - got)).sum(-1).mean()))
        return raw_bytes / coded_bytes, mean(nats)

    def blocks(self, kv: KV) -> list[bytearray]:
        """Return ``kv`` as raw bytes of blocks of 256 tokens, bfloat16, layout NHD."""
        found = []
        for at in range(0, kv[0][0].shape[2], _BLOCK):
            parts = [
                part[0, :, at : at + _BLOCK].transpose(0, 1).bfloat16().cpu().contiguous()
                for pair in kv
                for part in pair
            ]
            flat = torch.cat([one.view(-1) for one in parts])
            found.append(bytearray(flat.view(torch.uint8).numpy().tobytes()))
        return found

    def _kv_of(self, blocks: Sequence[bytearray], like: KV) -> KV:
        pieces: list[list[Tensor]] = [[] for _ in self.parts]
        for block in blocks:
            numbers = torch.frombuffer(block, dtype=torch.bfloat16)
            tokens = len(numbers) // sum(heads * dim for heads, dim in self.parts)
            sizes = [tokens * heads * dim for heads, dim in self.parts]
            cut = torch.split(numbers, sizes)
            for part, given, (heads, dim) in zip(pieces, cut, self.parts, strict=True):
                part.append(given.view(tokens, heads, dim))
        flat = [torch.cat(part).transpose(0, 1)[None].to(like[0][0]) for part in pieces]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _turned_back_vary_less(self) -> bool:
        """Whether keys vary less, turned back by their positions."""
        keys = [pair[0] for pair in self.kv(0)]
        if not len(self.speeds) or any(2 * len(self.speeds) > one.shape[3] for one in keys):
            return False
        flat = [_by_token(one) for one in keys]
        parts = [(one.shape[1], one.shape[2]) for one in flat]
        variances = []
        for rotated in ((), tuple(range(len(flat)))):
            fit = BasisFit(parts, rotated, self.speeds)
            fit.add_numbers(flat)
            variances.append(fit.variance())
        return variances[1] < variances[0]


def fit_basis(
    model: Any,
    ids: Tensor,
    *,
    nats: float = 2e-3,
    width: int = 256,
    context: int = CONTEXT,
    name: str = "",
    progress: Callable[[int], object] | None = None,
) -> FittedBasis:
    """Fit a basis to ``model`` (a causal language model of Transformers) on the text ``ids``.

    ``nats`` a token are allowed on prompts that are not fitted; ``width`` is the most channels that
    are transformed together: more make records smaller and decoding slower. ``context`` are the
    tokens of a prompt: how much errors matter depends on it, so take what is served. ``progress``
    is called after each prompt with 1. A text of 30,000 tokens or more is right; with less, the
    sensitivity is known less well, and records are larger for the same nats.

    Cost: nine passes forth and eight back for each prompt. Memory: as to train on 256 tokens behind
    a prompt, without states of an optimiser. Alters ``requires_grad`` of the model's parameters.

    Raises:
        InvalidValue: the text is too short, or the model is not of a kind that can be fitted.
    """
    if not nats > 0:
        raise InvalidValue(f"nats a token are above 0, got {nats}")
    whole("context", context, _BLOCK)
    least = 3 * (context + FOLLOWING)
    if len(ids) < least:
        raise InvalidValue(f"the text has {len(ids)} tokens; at least {least} are needed")
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    prompts = Prompts(model, ids, context=context)
    judged = range(len(prompts))[:: round(1 / _JUDGED)][:6]
    fitted = [number for number in range(len(prompts)) if number not in judged]
    fit = sum_up(prompts, fitted, width, progress)
    shape = BlockShape("bfloat16", "NHD", prompts.parts)
    noise = fit.noise_of(nats)
    best: FittedBasis | None = None
    for _ in range(_ROUNDS):
        basis = fit.basis(noise, name, _longest(model))
        ratio, measured = prompts.measure(TransformCodec(shape, [basis]), judged)
        found = FittedBasis(basis, ratio, measured)
        if best is None or (measured <= nats, -abs(measured - nats)) > (
            best.nats <= nats,
            -abs(best.nats - nats),
        ):
            best = found
        noise *= min(4.0, max(0.25, _MARGIN * nats / max(measured, 1e-9)))
    assert best is not None
    return best


def sum_up(
    prompts: Prompts,
    fitted: Sequence[int],
    width: int,
    progress: Callable[[int], object] | None = None,
) -> BasisFit:
    """Return the sums over the KV of these prompts and its gradients. Seeded by 0."""
    fit = BasisFit(prompts.parts, prompts.rotated, prompts.speeds, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for prompt in fitted:
            kv = prompts.kv(prompt)
            fit.add_numbers(_flat(kv))
            for _ in range(_DRAWS):
                fit.add_gradients(_flat(prompts.gradients(prompt, kv)), FOLLOWING)
            if progress is not None:
                progress(1)
    return fit


def fit_basis_of(
    path: str | os.PathLike[str],
    text: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    tokens: int = 40_000,
    name: str = "",
    **settings: Any,
) -> FittedBasis:
    """Load the model in ``path`` and fit a basis on the first ``tokens`` of ``text``.

    ``settings`` are those of `fit_basis`. The basis says ``name`` and the identity of the files.

    Raises:
        InvalidValue: there is no such model; or as `fit_basis`.
    """
    if not (Path(path) / "config.json").is_file():
        raise InvalidValue(
            f"no model at {path}: a directory with a config.json is needed{download_hint(path)}"
        )
    transformers = require("transformers", "transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    found = pick_device(device)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True
        )
        model.to(found)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidValue(f"the model in {path} cannot be loaded: {reason(error)}") from error
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    name = f"{name} ({model_identity(path)})"
    return fit_basis(model, ids[:tokens], name=name, **settings)


def _flat(kv: KV) -> list[Tensor]:
    return [_by_token(part) for pair in kv for part in pair]


def _by_token(part: Tensor) -> Tensor:
    """Return [1, heads, tokens, dim] as [tokens, heads, dim]."""
    return part[0].transpose(0, 1)


def _speeds(model: Any) -> NDArray[np.float64]:
    """Return the speeds of the model's rotary embedding; none if there are several, or none."""
    found = {
        tuple(module.inv_freq.double().cpu().tolist())
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    }
    return np.array(found.pop() if len(found) == 1 else (), np.float64)


def _longest(model: Any) -> int:
    return min(1 << 20, int(getattr(model.config, "max_position_embeddings", 1 << 17)))
