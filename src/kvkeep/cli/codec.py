"""``kvkeep codec``: fit a basis of the codec `transform`; measure what codecs change."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_count, add_json, add_model_path, add_option, add_path, number
from kvkeep.cli.arguments import model_name as name_of
from kvkeep.cli.codec_measure import add_measure, text_of
from kvkeep.cli.model import choose_threads
from kvkeep.cli.progress import progress
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "run"]

_WIDEST = 1024
_FOLLOWING = 256  # tokens by which a prompt is judged


def add_parser(commands: Commands) -> None:
    """Add the command, its action and its options."""
    codec = commands.add_parser(
        "codec",
        help="fit the codec transform to a model, and measure what codecs change",
        description="Fit the codec transform to a model, for tiers with "
        "codec=transform:basis=FILE; measure what codecs change of what a model says, for tiers "
        "with codec=auto. See docs/codecs.md.",
    )
    actions = codec.add_subparsers(title="actions", metavar="ACTION", required=True)
    fit = actions.add_parser(
        "fit",
        help="fit a basis to the KV that a model computes of a text",
        description="Compute the KV of a text, and how much errors in it change the model's "
        "predictions; write the basis in which KV takes the fewest bytes for the nats allowed. "
        "The model is loaded by Transformers. A fifth of the prompts, which are not fitted, judge "
        "the basis.",
    )
    add_model_path(fit, "local Hugging Face model directory")
    add_path(fit, "--out", "write the basis to this file")
    add_path(fit, "--text", "text like that which is served (default: Python's documentation)")
    add_option(
        fit,
        "--nats X",
        "Kullback-Leibler divergence of the next token that is allowed, in nats a token",
        type=number,
        default=2e-3,
    )
    add_count(fit, "--tokens", 40_000, "tokens of the text that are used")
    add_count(fit, "--context", 1024, "tokens of a prompt: as long as those that are served")
    add_count(
        fit, "--width", 256, "channels transformed together: more are smaller, but slower to read"
    )
    fit.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                     help="type of the model's weights (default: float32)")  # fmt: skip
    fit.add_argument(
        "--device", default="auto", help="torch device (default: a GPU if there is one)"
    )
    add_json(fit)
    fit.set_defaults(run=run)
    add_measure(actions)


def run(args: argparse.Namespace) -> int:
    """Fit, write and print what was gained."""
    whole("--width", args.width, 1, _WIDEST)
    whole("--context", args.context, _FOLLOWING)
    whole("--tokens", args.tokens, 3 * (args.context + _FOLLOWING))
    if args.out is None:
        raise InvalidValue("--out FILE is missing: the basis is written there")
    if not args.out.absolute().parent.is_dir():
        raise InvalidValue(f"cannot write {args.out}: there is no folder {args.out.parent}")
    text = text_of(args.text)
    choose_threads(args)  # before torch is imported
    from kvkeep.integrations.transformers_basis import fit_basis_of  # noqa: PLC0415 - torch
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415

    prompts = args.tokens // (args.context + _FOLLOWING)
    with progress("fitting", of=prompts, remaining=True) as advance:
        fitted = fit_basis_of(
            bundled_model() if args.model is None else args.model,
            text,
            dtype=args.dtype,
            device=args.device,
            tokens=args.tokens,
            nats=args.nats,
            width=args.width,
            context=args.context,
            name=name_of(args.model),
            progress=advance,
        )
    fitted.basis.save(args.out)
    basis = fitted.basis
    widest = max(group.width for group in basis.groups)
    if widest > args.width:
        print(
            f"kvkeep: --width {args.width} is less than a head, whose channels are never split: "
            f"groups have up to {widest}",
            file=sys.stderr,
        )
    if args.json:
        said = {
            "model": basis.model,
            "basis": basis.digest.hex(),
            "ratio": fitted.ratio,
            "nats": fitted.nats,
            "groups": len(basis.groups),
            "rotated": bool(basis.rotated),
            "bytes": args.out.stat().st_size,
        }
        print(json.dumps(said))
        return 0
    print(f"{basis.model}: {fitted.ratio:.2f} times smaller than bfloat16,")
    print(f"  at {fitted.nats:.2g} nats a token on text that was not fitted")
    if fitted.nats > args.nats:
        print(f"  That is more than the {args.nats:.2g} allowed: more --tokens can help.")
    print(f"Written to {args.out}. A tier uses it with codec=transform:basis={args.out}")
    return 0
