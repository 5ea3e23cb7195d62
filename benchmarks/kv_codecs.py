"""What codecs gain and cost: bytes, GB/s on one core, and the change of what a model says.

Speeds are measured side by side: every codec takes its turn in each round, on the same bytes; the
figure is the median of the rounds, with the slowest and the fastest. A copy of the same bytes is
the floor. GB/s are raw bytes per second of the thread's own CPU time, so that other load on the
machine counts less. Blocks are the bundled model's, random normals as large as Llama 3.1 8B's, and
noise; random content is for speed only.

Changes are measured on two models: the bundled one, and one that is trained here on other text
(codecs_model.py; about five minutes, once). Each reuses KV of a prompt, at several depths, after a
codec: *nats* are the Kullback-Leibler divergence of the next token's distribution from that behind
exact KV, over the text that follows; *changed* is the share of greedy answers of 32 tokens that
differ, and the mean number of tokens before they do. Seeded; one thread.

    python benchmarks/kv_codecs.py                       # the tables
    python benchmarks/kv_codecs.py --json                # for machines
    python benchmarks/kv_codecs.py --quick               # the bundled model, fewer rounds
    python benchmarks/kv_codecs.py --picture FILE.png    # bytes against nats
    python benchmarks/kv_codecs.py --codecs int8,int4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch

from codec_probe import ReuseProbe, Speed, measure
from codecs_model import bundled_probe, rows_of, second_model, texts
from kvkeep.store.codecs import CODECS, BlockShape, make_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK = 256  # tokens
KEY = bytes(range(32))
DEPTHS = (64, 256, 512, 1024, 2048)
ANSWERED = (256, 1024)  # depths behind which answers are compared

CASES = ("the bundled model's", "random normals", "random bytes")
GOALS = {
    (CASES[0], "lossless", "ratio"): 1.3,
    (CASES[0], "int8", "ratio"): 1.9,
    (CASES[0], "int4", "ratio"): 3.5,
    (CASES[0], "lossless", "decode"): 1.0,
}
NATS_GOALS = {"int8": 1e-3, "int4": 1e-3}


@dataclass(frozen=True, slots=True)
class Quality:
    """One codec on one model: nats by depth, (share changed, tokens before) by depth."""

    codec: str
    ratio: float
    nats: dict[int, float]
    changed: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OneModel:
    """A model with its prompts, and what is to be said of it."""

    name: str
    said: str
    probe: ReuseProbe
    answering: ReuseProbe


def bundled(quick: bool) -> OneModel:
    """The bundled model; its answers continue other prompts, of the same text."""
    probe = bundled_probe(prompts=1 if quick else 3)
    text = "\n\n".join(topics[name] for name in sorted(topics)[1::4])
    rows = rows_of(text, max(ANSWERED) + 64, 8 if quick else 24)
    answering = ReuseProbe(probe.model, rows, following=64)
    said = "the bundled model: 4 layers, 2 KV heads of 32, text that it was trained on"
    return OneModel("bundled", said, probe, answering)


def trained() -> OneModel:
    """A model trained here, on text that it has never seen."""
    model, loss = second_model()
    unseen = "".join(texts()[1])
    probe = ReuseProbe(model.train(False), rows_of(unseen, max(DEPTHS) + 256, 3))
    rows = rows_of(unseen, max(ANSWERED) + 64, 24)
    answering = ReuseProbe(model, rows, following=64)
    said = (
        f"a model trained here: {model.config.num_hidden_layers} layers, 2 KV heads of 64, "
        f"{model.num_parameters() / 1e6:.1f} M parameters, {loss:.2f} nats a token on unseen text"
    )
    return OneModel("trained", said, probe, answering)


# --- speed ---------------------------------------------------------------------------------------


def speeds(probe: ReuseProbe, names: Sequence[str], rounds: int) -> dict[str, list[Speed]]:
    """Measure every codec on every case, and two of them encrypted."""
    llama = BlockShape("bfloat16", "NHD", ((8, 128),) * 64)
    count = BLOCK * 64 * 8 * 128
    normals = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    cases = {
        CASES[0]: (probe.shape, probe.blocks()),
        CASES[1]: (llama, (normals.view(torch.uint8).numpy().tobytes(),)),
        CASES[2]: (llama, (os.urandom(2 * count),)),
    }
    found = {}
    for case, (shape, blocks) in cases.items():
        codecs: list[tuple[str, Any]] = [("(a copy)", None)]
        codecs += [(name, make_codec(name, shape)) for name in names if _fits(name, shape)]
        sealed = [make_codec(name, shape, KEY) for name in ("raw", "lossless")]
        codecs += [(codec.name, codec) for codec in sealed]
        found[case] = measure(blocks, codecs, rounds)
    return found


def _fits(name: str, shape: BlockShape) -> bool:
    """Whether a setting that is made for one model fits these parts."""
    setting = name.partition(":")[2]
    return not setting.isdecimal() or len(shape.parts) % len(setting) == 0


# --- quality -------------------------------------------------------------------------------------


def quality(one: OneModel, names: Sequence[str], depths: Sequence[int]) -> list[Quality]:
    """Measure what each codec changes, at each depth."""
    exact = {depth: _answers(one.answering, None, depth) for depth in ANSWERED}
    found = []
    for name in names:
        codec = make_codec(name, one.probe.shape)
        raws = one.probe.blocks()
        out = memoryview(bytearray(codec.bound(len(raws[0]))))
        size = sum(codec.encode(memoryview(raw), out, b"") for raw in raws)
        nats = {depth: one.probe.nats(codec, depth) for depth in depths}
        changed = {}
        for depth, answers in exact.items():
            other = _answers(one.answering, name, depth)
            share, first = one.answering.changed(answers, other)
            changed[depth] = (share, first)
        found.append(Quality(name, sum(map(len, raws)) / size, nats, changed))
        print(f"{one.name}: {name}", file=sys.stderr, flush=True)
    return found


def _answers(probe: ReuseProbe, codec: str | None, depth: int) -> Tensor:
    kv = [(k[:, :, :depth], v[:, :, :depth]) for k, v in probe.kv]
    if codec is not None:
        kv = probe.through(make_codec(codec, probe.shape), depth)
    return probe.answers(kv, depth)


# --- what is printed -----------------------------------------------------------------------------


def speed_table(found: dict[str, list[Speed]]) -> str:
    """Return the speeds as text, with ✓ or ✗ if there is a goal."""
    lines = [f"{'':26}{'ratio':>9}{'encode GB/s':>24}{'decode GB/s':>24}"]
    for case, figures in found.items():
        lines.append(f"KV: {case}")
        for one in figures:
            spans = [f"{m:6.2f} ({a:.2f}–{b:.2f})" for a, m, b in (one.encode, one.decode)]
            ratio = f"{one.ratio:.2f}×{_mark(case, one.codec, 'ratio', one.ratio)}"
            decode = spans[1] + _mark(case, one.codec, "decode", one.decode[1])
            lines.append(f"  {one.codec:24}{ratio:>9}{spans[0]:>24}{decode:>24}")
    return "\n".join(lines)


def _mark(case: str, codec: str, what: str, value: float) -> str:
    goal = GOALS.get((case, codec, what))
    return "" if goal is None else f" {'✓' if value >= goal else '✗'}"


def quality_table(said: str, found: Sequence[Quality]) -> str:
    """Return the changes as text: nats by depth, then answers by depth."""
    depths = list(found[0].nats)
    lines = [said, f"{'nats behind':26}{'ratio':>8}" + "".join(f"{n:>10,}" for n in depths)]
    for one in found:
        goal = NATS_GOALS.get(one.codec)
        worst = max(one.nats.values())
        mark = "" if goal is None else f"  {'✓' if worst <= goal else '✗'} (goal ≤ {goal:g})"
        values = "".join(f"{one.nats[n]:>10.2g}" for n in depths)
        lines.append(f"  {one.codec:24}{one.ratio:7.2f}×{values}{mark}")
    answered = list(found[0].changed)
    lines.append(f"{'answers changed behind':34}" + "".join(f"{n:>22,}" for n in answered))
    for one in found:
        cells = [f"{share:.0%}, after {first:.1f}" for share, first in one.changed.values()]
        lines.append(f"  {one.codec:32}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def picture(path: str, models: dict[str, tuple[str, list[Quality]]]) -> None:
    """Draw bytes against nats, one panel a model."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg" if path.endswith(".svg") else "agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    plt.rcParams.update({"svg.hashsalt": "kvkeep", "font.size": 9})
    figure, panels = plt.subplots(1, len(models), figsize=(4.6 * len(models), 3.6), sharey=True)
    for panel, (said, found) in zip(
        [panels] if len(models) == 1 else panels, models.values(), strict=True
    ):
        lossy = [one for one in found if one.ratio > 1 and max(one.nats.values()) > 1e-9]
        families: dict[str, list[tuple[float, float, str]]] = {}
        for one in lossy:
            kind, colon, setting = one.codec.partition(":")
            long = len(setting) > 2 and setting.isdecimal()
            family = f"{kind}, bits by part" if long else kind
            label = "" if long or not colon else f":{setting}"
            worst = max(one.nats.values())
            families.setdefault(family, []).append((one.ratio, worst, label))
        for family, points in families.items():
            points.sort()
            drawn = panel.plot(
                [x for x, _, _ in points], [y for _, y, _ in points], marker="o", ms=4, lw=1,
                label=family,
            )  # fmt: skip
            for x, y, label in points:
                if len(label) < 6:
                    panel.annotate(label, (x, y), textcoords="offset points", xytext=(4, -8),
                                   fontsize=7, color=drawn[0].get_color())  # fmt: skip
        panel.axhline(1e-3, color="grey", lw=0.7, ls="--")
        panel.set_yscale("log")
        panel.set_xlabel("times smaller than bfloat16")
        panel.set_title(said.partition(":")[0], fontsize=9)
        panel.grid(alpha=0.25)
        panel.legend(fontsize=7, loc="lower right")
    panels_first = panels if len(models) == 1 else panels[0]
    panels_first.set_ylabel("nats, at the worst depth")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument("--quick", action="store_true", help="the bundled model, fewer rounds")
    parser.add_argument("--codecs", metavar="LIST", help="these only, separated by commas")
    parser.add_argument("--picture", metavar="FILE", help="draw bytes against nats, SVG or PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = options.codecs.split(",") if options.codecs else None
    models = [bundled(options.quick)] + ([] if options.quick else [trained()])
    timed = speeds(models[0].probe, chosen or list(CODECS), 2 if options.quick else 7)
    if not options.json:
        print(speed_table(timed), flush=True)
    depths = (256, 2048) if options.quick else DEPTHS
    found = {}
    for one in models:
        names = chosen or list(CODECS)
        measured = quality(one, [name for name in names if _fits(name, one.probe.shape)], depths)
        found[one.name] = (one.said, measured)
        if not options.json:
            print(f"\n{quality_table(one.said, measured)}", flush=True)
    if options.picture:
        picture(options.picture, found)
    if options.json:
        changes = {
            name: {"model": said, "codecs": [asdict(one) for one in each]}
            for name, (said, each) in found.items()
        }
        speed = {case: [asdict(one) for one in each] for case, each in timed.items()}
        print(json.dumps({"speeds": speed, "changes": changes}, indent=1))


if __name__ == "__main__":
    main()
