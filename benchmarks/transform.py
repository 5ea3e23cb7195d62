"""What `transform` gains and costs, and the spectra that explain it.

Of the bundled model and of one that is trained here (codecs_model.py; about five minutes, once):

- *spectra*: what each axis of KV carries, in nats a token, when channels of one head, of K and V of
  a head, of a layer, of several layers are transformed together; and the bits a number that the
  spectrum asks for at 2e-3 nats a token by reverse water-filling, plus a quarter for whole codes;
- the same with keys as they are cached, not turned back, and with all channels as sensitive;
- *measured*: bytes, nats behind several depths, GB/s of the thread's own CPU time, for bases of
  several widths and errors; and how many of the nats are due to the first tokens, and the newest.

A basis is fitted to other text than it is judged by. Seeded; one thread.

    python benchmarks/transform.py                       # the tables, about ten minutes
    python benchmarks/transform.py --quick               # the bundled model, less text
    python benchmarks/transform.py --json                # for machines
    python benchmarks/transform.py --picture FILE.svg    # spectra, and bytes against nats
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.bench.codecs import ReuseProbe, Speed, measure
from kvkeep.integrations.transformers_basis import FOLLOWING, Prompts
from kvkeep.serve.models import bundled_model
from kvkeep.store.codecs import BlockShape
from kvkeep.store.codecs.basis_fit import BasisFit
from kvkeep.store.codecs.transform import TransformCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvkeep.store.codecs.basis import Basis

NATS = 2e-3
DEPTHS = (1024, 2048)
CONTEXT = 2048
DRAWS = 8
WIDTHS = (64, 128, 256, 512)
CHOSEN = 256  # the default of kvkeep codec fit
NOISES = (0.3, 1.0, 3.0)  # times that at which the spectrum predicts NATS
FIRST, NEWEST = 4, 64  # tokens that are exact in two of the variants
GOALS = {"ratio": 6.0, "decode": 0.5}
LLAMA = ((8, 128),) * 64


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to fit: channels together, and what is left out of the method."""

    name: str
    width: int
    turned: bool = True
    sensitive: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """A basis measured: bytes of bfloat16 for each encoded byte, nats a token by depth."""

    ratio: float
    nats: dict[int, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant on one model.

    ``bits`` a number are what the spectrum asks for at `NATS`; ``at_goal`` is the ratio at `NATS`
    at the worst depth, between the ``points``; ``spectrum`` is in nats a token, descending.
    """

    variant: str
    bits: float
    at_goal: float
    points: list[Point]
    spectrum: list[float]


VARIANTS = (
    *(Variant(f"{width} channels", width) for width in WIDTHS),
    Variant("keys not turned back", CHOSEN, turned=False),
    Variant("all as sensitive", CHOSEN, sensitive=False),
)


@dataclass(frozen=True, slots=True)
class OneModel:
    """A model, text to fit, and probes on other text."""

    name: str
    model: Any
    ids: Tensor
    probe: ReuseProbe


def models(quick: bool) -> list[OneModel]:
    """Return the bundled model and the one trained here."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())

    def ids(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, verbose=False).input_ids)

    names = sorted(topics)
    fitted = "\n\n".join(topics[name] for number, name in enumerate(names) if number % 7)
    judged = "\n\n".join(topics[name] for name in names[::7])
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    tokens = 16_000 if quick else 36_000
    found = [OneModel("the bundled model", model, ids(fitted)[:tokens], _probe(model, ids(judged)))]
    if not quick:
        from codecs_model import second_model, texts  # noqa: PLC0415

        learned, unseen = ("".join(part) for part in texts())
        model = second_model().model
        prompts = ids(unseen[: 40 * CONTEXT])
        found.append(OneModel("a model trained here", model, ids(learned[: 8 * tokens])[:tokens],
                              _probe(model, prompts)))  # fmt: skip
    return found


def _probe(model: Any, ids: Tensor) -> ReuseProbe:
    step = max(DEPTHS) + FOLLOWING
    return ReuseProbe(model, ids[: 3 * step].view(3, step), following=FOLLOWING)


def fits(one: OneModel, variants: Sequence[Variant]) -> dict[str, BasisFit]:
    """Sum up KV and gradients once, for all variants."""
    for parameter in one.model.parameters():
        parameter.requires_grad_(requires_grad=False)
    torch.manual_seed(0)
    prompts = Prompts(one.model, one.ids, context=CONTEXT)
    found = {
        each.name: BasisFit(
            prompts.parts, prompts.rotated if each.turned else (), prompts.speeds, each.width
        )
        for each in variants
    }
    for prompt in range(len(prompts)):
        kv = prompts.kv(prompt)
        for fit in found.values():
            fit.add_numbers(_by_token(kv))
        for _ in range(DRAWS):
            gradients = _by_token(prompts.gradients(prompt, kv))
            size = math.sqrt(sum(float(g.square().sum()) for g in gradients)
                             / sum(g.numel() for g in gradients))  # fmt: skip
            alike = [torch.randn_like(g) * size for g in gradients]
            for each in variants:
                found[each.name].add_gradients(gradients if each.sensitive else alike, FOLLOWING)
        print(f"{one.name}: prompt {prompt + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return found


def _by_token(kv: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [part[0].transpose(0, 1) for pair in kv for part in pair]


def measured(one: OneModel, variant: Variant, fit: BasisFit) -> tuple[Measured, Basis]:
    """Measure bases of three errors; return also the one at the goal."""
    scale = 1.0 if variant.sensitive else 0.2
    spectrum = torch.cat(fit.spectra()).sort(descending=True).values
    noise = fit.noise_of(NATS)
    kept = spectrum[spectrum > noise]
    bits = float((0.5 * (kept / noise).log2() + 0.25).sum()) / len(spectrum)
    points = [
        point_of(one.probe, fit.basis(noise * times * scale, one.name, 1 << 13)) for times in NOISES
    ]
    at_goal, times = _between(points)
    basis = fit.basis(noise * times * scale, one.name, 1 << 13)
    return Measured(variant.name, bits, at_goal, points, spectrum.tolist()), basis


def point_of(probe: ReuseProbe, basis: Basis) -> Point:
    """Measure ratio and nats of a basis."""
    codec = TransformCodec(probe.shape, [basis])
    raws = probe.blocks()
    out = memoryview(bytearray(codec.bound(max(map(len, raws)))))
    size = sum(codec.encode(memoryview(bytearray(raw)), out, b"") for raw in raws)
    return Point(sum(map(len, raws)) / size, {n: probe.nats(codec, n) for n in DEPTHS})


def _between(points: Sequence[Point]) -> tuple[float, float]:
    """Return ratio and error where the nats of the worst depth are `NATS`, straight in logarithms.

    Outside of the points the nearest two are continued.
    """
    logs = [
        (math.log(max(one.nats.values()) / NATS), math.log(one.ratio), math.log(times))
        for one, times in zip(points, NOISES, strict=True)
    ]
    low, high = logs[:2] if logs[1][0] > 0 else logs[1:]
    share = -low[0] / (high[0] - low[0])
    return tuple(math.exp(low[i] + share * (high[i] - low[i])) for i in (1, 2))  # type: ignore[return-value]


def kept_exact(one: OneModel, basis: Basis) -> dict[str, float]:
    """Return nats behind the deepest prompts if some tokens had stayed exact."""
    depth = max(DEPTHS)
    kv = one.probe.through(TransformCodec(one.probe.shape, [basis]), depth)
    found = {"none": one.probe.nats_of(kv, depth)}
    for name, tokens in (
        (f"the first {FIRST}", slice(0, FIRST)),
        (f"the newest {NEWEST}", slice(depth - NEWEST, depth)),
    ):
        mixed = [tuple(part.clone() for part in pair) for pair in kv]
        for pair, exact in zip(mixed, one.probe.kv, strict=True):
            for part, right in zip(pair, exact, strict=True):
                part[:, :, tokens] = right[:, :, :depth][:, :, tokens]
        found[name] = one.probe.nats_of(mixed, depth)  # type: ignore[arg-type]
    return found


def speeds(one: OneModel, bases: dict[str, Basis], rounds: int) -> dict[str, list[Speed]]:
    """Time bases on the model's blocks, and one of `CHOSEN` channels on blocks of Llama's size."""
    codecs = [(name, TransformCodec(one.probe.shape, [basis])) for name, basis in bases.items()]
    found = {one.name: measure(one.probe.blocks(), codecs, rounds)}
    normals = torch.randn(256, len(LLAMA) * 8 * 128, generator=torch.Generator().manual_seed(0))
    parts = [part.reshape(256, 8, 128) for part in torch.split(normals, 1024, 1)]
    speeds = 500_000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    fit = BasisFit(LLAMA, range(0, 64, 2), speeds.numpy(), CHOSEN)
    fit.add_numbers(parts)
    fit.add_gradients(parts, 256)
    basis = fit.basis(fit.noise_of(0.1 * float(torch.cat(fit.spectra()).sum())), "normals", 1 << 17)
    codec = TransformCodec(BlockShape("bfloat16", "NHD", LLAMA), [basis])
    raw = torch.cat([part.reshape(-1) for part in parts]).bfloat16().view(torch.uint8).numpy()
    found["random numbers of Llama 3.1 8B's size"] = measure(
        [raw.tobytes()], [(f"{CHOSEN} channels", codec)], max(1, rounds // 2)
    )
    return found


def table(name: str, found: Sequence[Measured], exact: dict[str, float]) -> str:
    """Return what was measured of a model as text."""
    head = "".join(f"{f'nats at {n:,}':>14}" for n in DEPTHS)
    lines = [name, f"  {'':24}{'bits':>6}{'at 2e-3':>9}{'ratio':>8}{head}"]
    for one in found:
        for number, point in enumerate(one.points):
            said = (
                f"  {one.variant:24}{one.bits:6.2f}{one.at_goal:8.2f}×" if not number else " " * 41
            )
            nats = "".join(f"{value:14.2g}" for value in point.nats.values())
            lines.append(f"{said}{point.ratio:7.2f}×{nats}")
    said = ", ".join(f"{which}: {value:.2g}" for which, value in exact.items())
    lines.append(f"  nats at {max(DEPTHS):,} with exact tokens, {CHOSEN} channels: {said}")
    return "\n".join(lines)


def speed_table(found: dict[str, list[Speed]]) -> str:
    """Return the speeds as text."""
    lines = [f"{'':26}{'ratio':>8}{'encode GB/s':>24}{'decode GB/s':>24}"]
    for case, figures in found.items():
        lines.append(case)
        for one in figures:
            spans = [f"{m:6.2f} ({a:.2f}–{b:.2f})" for a, m, b in (one.encode, one.decode)]
            mark = "✓" if one.decode[1] >= GOALS["decode"] else "✗"
            lines.append(f"  {one.codec:24}{one.ratio:7.2f}×{spans[0]:>24}{spans[1]:>24} {mark}")
    return "\n".join(lines)


def picture(path: str, found: dict[str, list[Measured]]) -> None:
    """Draw each model's spectra, and bytes against nats."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg" if path.endswith(".svg") else "agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    plt.rcParams.update({"svg.hashsalt": "kvkeep", "font.size": 9})
    figure, panels = plt.subplots(len(found), 2, figsize=(9.2, 3.4 * len(found)), squeeze=False)
    for (name, variants), (left, right) in zip(found.items(), panels, strict=True):
        for one in variants:
            shares = [(i + 0.5) / len(one.spectrum) for i in range(len(one.spectrum))]
            left.plot(shares, one.spectrum, lw=1, label=one.variant)
            worst = [max(point.nats.values()) for point in one.points]
            right.plot([point.ratio for point in one.points], worst, marker="o", ms=3, lw=1,
                       label=one.variant)  # fmt: skip
        left.set(yscale="log", ylim=(1e-9, None), title=f"{name}: spectra", xlabel="share of axes",
                 ylabel="nats a token in an axis")  # fmt: skip
        right.axhline(NATS, color="grey", lw=0.7, ls="--")
        right.axvline(GOALS["ratio"], color="grey", lw=0.7, ls="--")
        right.set(yscale="log", title=f"{name}: measured", xlabel="times smaller than bfloat16",
                  ylabel="nats, at the worst depth")  # fmt: skip
        right.legend(fontsize=7, loc="lower right")
        for panel in (left, right):
            panel.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument("--quick", action="store_true", help="the bundled model, less text")
    parser.add_argument("--picture", metavar="FILE", help="draw spectra and nats, SVG or PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Measured]] = {}
    timed: dict[str, list[Speed]] = {}
    exact: dict[str, dict[str, float]] = {}
    for one in models(options.quick):
        sums = fits(one, VARIANTS)
        found[one.name], bases = [], {}
        for variant in VARIANTS:
            said, basis = measured(one, variant, sums[variant.name])
            found[one.name].append(said)
            if variant.turned and variant.sensitive:
                bases[variant.name] = basis
        exact[one.name] = kept_exact(one, bases[f"{CHOSEN} channels"])
        if not options.json:
            print(table(one.name, found[one.name], exact[one.name]), flush=True)
        timed |= speeds(one, bases, 3 if options.quick else 7)
    if options.picture:
        picture(options.picture, found)
    if options.json:
        print(json.dumps({
            "measured": {name: [asdict(one) for one in each] for name, each in found.items()},
            "exact": exact,
            "speeds": {case: [asdict(one) for one in each] for case, each in timed.items()},
        }, indent=1))  # fmt: skip
    else:
        print(speed_table(timed))


if __name__ == "__main__":
    main()
