"""``kvkeep codec measure``: what codecs change of what a model says, for ``codec=auto``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import add_count, add_json, add_model_path, add_option, add_path
from kvkeep.cli.arguments import model_name as name_of
from kvkeep.cli.model import choose_threads
from kvkeep.cli.progress import progress
from kvkeep.core.errors import InvalidValue, reason, require, whole
from kvkeep.core.geometry import download_hint

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

__all__ = ["add_measure", "run", "text_of"]

_FOLLOWING = 256  # tokens by which a prompt is judged
_CHARACTERS = 1 << 20  # of the built-in text: about 300,000 tokens
_MEASURED = "raw,lossless,int8,int4:6,int4:5,int4:54,int4,int4:3"
_RATIOS = (3.5, 5.0)  # for which int4 gets bits by part
_OVERHEAD = 0.2  # bits a number for scales and zero points


def add_measure(actions: Any) -> None:
    """Add the action ``measure`` and its options."""
    measure = actions.add_parser(
        "measure",
        help="measure what codecs change of what a model says",
        description="Compute the KV of prompts, encode and decode it by each codec, and compare "
        "what the model expects behind it with what it expects behind exact KV. The file is for "
        "codec=auto:nats=1e-3,figures=FILE. The model is loaded by Transformers.",
    )
    add_model_path(measure, "local Hugging Face model directory")
    add_path(measure, "--out", "write the figures to this file")
    add_path(measure, "--text", "text like that which is served (default: Python's documentation)")
    add_option(measure, "--codecs LIST", "codecs, separated by commas", default=_MEASURED)
    measure.add_argument(
        "--bits", action="store_true", help="also int4 with the bits by part that suit the model"
    )
    add_count(measure, "--prompts", 3, "prompts")
    add_count(measure, "--context", 1024, "tokens of a prompt: as long as those that are served")
    add_json(measure)
    measure.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write and print."""
    whole("--prompts", args.prompts, 1)
    whole("--context", args.context, 1)
    if args.out is None:
        raise InvalidValue("--out FILE is missing: the figures are written there")
    if not args.out.absolute().parent.is_dir():
        raise InvalidValue(f"cannot write {args.out}: there is no folder {args.out.parent}")
    text = text_of(args.text)
    choose_threads(args)  # before torch is imported
    from kvkeep.bench.codecs import allocate, measure, sensitivities  # noqa: PLC0415 - torch
    from kvkeep.store.codecs import make_codec  # noqa: PLC0415
    from kvkeep.store.codecs.auto import FIGURES_VERSION  # noqa: PLC0415

    probe = _probe(args, text)
    names = list(dict.fromkeys(args.codecs.split(",")))
    if args.bits:
        nats = sensitivities(probe)
        sizes = [heads * dim for heads, dim in probe.shape.parts]
        names += [f"int4:{allocate(nats, sizes, 16 / ratio - _OVERHEAD)}" for ratio in _RATIOS]
    codecs = [(name, make_codec(name, probe.shape)) for name in names]
    found: list[dict[str, object]] = []
    with progress("measuring", of=len(codecs), remaining=True) as advance:
        for name, codec in codecs:
            (speed,) = measure(probe.blocks(), [(name, codec)], 3)
            cost = 0.0 if codec.exact else max(0.0, probe.nats(codec))
            found.append(
                {
                    "codec": name,
                    "ratio": speed.ratio,
                    "nats": cost,
                    "encode_gb_s": speed.encode[1],
                    "decode_gb_s": speed.decode[1],
                }
            )
            advance(1)
    said = {
        "kvkeep_codecs": FIGURES_VERSION,
        "model": name_of(args.model),
        "parts": [list(part) for part in probe.shape.parts],
        "context": args.context,
        "codecs": found,
    }
    args.out.write_text(json.dumps(said, indent=1) + "\n", "utf-8")
    if args.json:
        print(json.dumps(said))
        return 0
    print(f"{'codec':24}{'smaller':>8}{'nats':>10}{'encode':>8}{'decode':>8} GB/s")
    for one in found:
        print(
            f"{one['codec']:24}{one['ratio']:7.2f}×{one['nats']:10.2g}"
            f"{one['encode_gb_s']:8.2f}{one['decode_gb_s']:8.2f}"
        )
    print(f"Written to {args.out}. A tier uses it with codec=auto:nats=1e-3,figures={args.out}")
    return 0


def _probe(args: argparse.Namespace, text: str) -> Any:
    import torch  # noqa: PLC0415

    from kvkeep.bench.codecs import ReuseProbe  # noqa: PLC0415
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415

    path = bundled_model() if args.model is None else args.model
    if not (path / "config.json").is_file():
        raise InvalidValue(
            f"no model at {path}: a directory with a config.json is needed{download_hint(path)}"
        )
    hf = require("transformers", "transformers")
    hf.utils.logging.disable_progress_bar()
    try:
        tokenizer = hf.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = hf.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidValue(f"the model in {path} cannot be loaded: {reason(error)}") from error
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    step = args.context + _FOLLOWING
    rows = min(args.prompts, len(ids) // step)
    if not rows:
        raise InvalidValue(f"the text has {len(ids)} tokens; one prompt needs {step}")
    model.train(False)
    return ReuseProbe(model, ids[: rows * step].view(rows, step), following=_FOLLOWING)


def text_of(path: Path | None) -> str:
    """Return the text of a file, or Python's documentation. Raises `InvalidValue`."""
    if path is None:
        from pydoc_data.topics import topics  # noqa: PLC0415 - large

        return "\n\n".join(topics[name] for name in sorted(topics))[:_CHARACTERS]
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is no text in UTF-8") from error
