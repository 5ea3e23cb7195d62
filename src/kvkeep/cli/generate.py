"""``kvkeep generate``: generate text with a model on the paged cache."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_count, add_json, add_option, add_switch, count, number
from kvkeep.cli.model import add_dtype, add_model_arguments, choose_threads, load
from kvkeep.cli.progress import progress

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.arguments import Commands
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Completion, Engine, SamplingParams, Tokenizer

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "generate",
        help="generate text with a model on the paged cache",
        description="Generate text. Prompts of one call share the KV of their common prefixes.",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", required=True, help="prompt; may be repeated"
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="the prompt is a user's message (default for models with a chat template)",
    )
    style.add_argument(
        "--raw", action="store_false", dest="chat", help="the prompt is text to be continued"
    )
    add_model_arguments(parser, memory="1GiB")
    add_dtype(parser)
    add_switch(parser, "--no-cache", "compute every prompt in full; reuse nothing")
    _add_sampling(parser.add_argument_group("sampling"))
    add_json(parser)
    parser.set_defaults(run=run)


def _add_sampling(sampling: argparse._ArgumentGroup) -> None:
    add_count(sampling, "--max-tokens", 128, "tokens to generate per prompt")
    add_option(
        sampling,
        "--temperature T",
        "sampling temperature; 0: always the most likely token",
        type=number,
        default=0.0,
    )
    add_option(
        sampling,
        "--top-p P",
        "sample from the most likely tokens whose probabilities add up to P",
        type=number,
        default=1.0,
    )
    add_option(
        sampling,
        "--top-k K",
        "sample from the K most likely tokens; 0: from all",
        type=count,
        default=0,
    )
    add_option(sampling, "--seed N", "seed (default: a random one)", type=count)
    sampling.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text; may be repeated",
    )
    add_count(
        sampling, "--draft-tokens", 0, "tokens to guess per step from repetitions in the prompt"
    )


def run(args: argparse.Namespace) -> int:
    """Generate, and print the completions."""
    choose_threads(args)
    with progress("starting"):
        from kvkeep.serve.engine import Engine, SamplingParams  # noqa: PLC0415 - seconds, for torch

    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        draft_tokens=args.draft_tokens,
    )
    runner, tokenizer = load(args, dtype=args.dtype)
    cache = runner.cache(reuse=not args.no_cache)
    engine = Engine(runner, cache, tokenizer)
    prompts = [_tokens(text, tokenizer, args.chat) for text in args.prompt]
    if len(prompts) == 1 and not args.json:
        _print_stream(engine, prompts, params)
        return 0
    with progress("generating", of=len(prompts)) as advance:
        done: dict[int, Completion] = {}
        for delta in engine.stream(prompts, params):
            if delta.completion is not None:
                done[delta.request.id] = delta.completion
                advance()
    completions = [done[number] for number in sorted(done)]
    if args.json:
        answers = [
            {"prompt": prompt, **_as_json(completion)}
            for prompt, completion in zip(args.prompt, completions, strict=True)
        ]
        print(json.dumps({"completions": answers, "cache": cache.stats().as_dict()}))
        return 0
    for prompt, completion in zip(args.prompt, completions, strict=True):
        print(f"> {prompt}\n{completion.text}\n", flush=True)
        _print_figures(completion)
    return 0


def _as_json(completion: Completion) -> dict[str, object]:
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "ttft_s": completion.ttft_s,
        "seconds": completion.seconds,
    }


def _tokens(prompt: str, tokenizer: Tokenizer, chat: bool | None) -> TokenArray:
    if tokenizer.has_chat_template if chat is None else chat:
        return tokenizer.chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def _print_stream(engine: Engine, prompts: list[TokenArray], params: SamplingParams) -> None:
    for delta in engine.stream(prompts, params):
        print(delta.text, end="", flush=True)
        if delta.completion is not None:
            print(flush=True)
            _print_figures(delta.completion)


def _print_figures(completion: Completion) -> None:
    """Print one line of figures on stderr; stdout has only the text."""
    print(
        f"[{completion.prompt_tokens} prompt tokens, {completion.cached_tokens} reused; "
        f"{len(completion.tokens)} generated ({completion.finish_reason}); "
        f"first after {completion.ttft_s * 1000:.1f} ms, all after {completion.seconds:.2f} s]",
        file=sys.stderr,
    )
