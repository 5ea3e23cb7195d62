"""``kvkeep generate``: let a model continue prompts, over the paged cache."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvkeep.cli.model import add_model_arguments, choose_threads, load, progress
from kvkeep.cli.numbers import count

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.model import Commands
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Completion, Engine, SamplingParams, Tokenizer

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "generate",
        help="generate text with a model on the paged cache",
        description="Generate text. Prompts of one call share what they have in common.",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", required=True, help="may be given repeatedly"
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
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: as saved)")
    parser.add_argument(
        "--no-cache", action="store_true", help="compute every prompt in full, reuse nothing"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", metavar="N", type=count, default=128)
    sampling.add_argument("--temperature", metavar="T", type=float, default=0.0)
    sampling.add_argument("--top-p", metavar="P", type=float, default=1.0)
    sampling.add_argument("--top-k", metavar="K", type=count, default=0)
    sampling.add_argument("--seed", metavar="N", type=int)
    sampling.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text"
    )
    sampling.add_argument(
        "--draft-tokens",
        metavar="N",
        type=count,
        default=0,
        help="guess up to N tokens a step from what the prompt repeats (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    choose_threads(args)
    with progress("starting"):
        from kvkeep.core.cache import PagedCache  # noqa: PLC0415
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
    cache = PagedCache(runner.num_pages, runner.page_size, reuse=not args.no_cache)
    engine = Engine(runner, cache, tokenizer)
    prompts = [_tokens(text, tokenizer, args.chat) for text in args.prompt]
    if len(prompts) == 1 and not args.json:
        _print_as_it_comes(engine, prompts, params)
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


def _print_as_it_comes(engine: Engine, prompts: list[TokenArray], params: SamplingParams) -> None:
    for delta in engine.stream(prompts, params):
        print(delta.text, end="", flush=True)
        if delta.completion is not None:
            print(flush=True)
            _print_figures(delta.completion)


def _print_figures(completion: Completion) -> None:
    """One line on stderr, so that stdout has the text alone."""
    print(
        f"[{completion.prompt_tokens} prompt tokens, {completion.cached_tokens} reused; "
        f"{len(completion.tokens)} generated ({completion.finish_reason}); "
        f"first after {completion.ttft_s * 1000:.1f} ms, all after {completion.seconds:.2f} s]",
        file=sys.stderr,
    )
