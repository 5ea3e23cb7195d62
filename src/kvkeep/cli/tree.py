"""``kvkeep tree``: the prefix tree of some prompts, or of a running server, as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.arguments import add_json, add_model_path, add_option, count
from kvkeep.cli.server import add_server_arguments
from kvkeep.cli.tree_live import LIVE, add_live_arguments, draw_server
from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, reason, require, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.prefix import INDICES
from kvkeep.core.prefix.render import draw
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvkeep.cli.arguments import Commands
    from kvkeep.core.tokens import TokenArray

__all__ = ["add_parser", "run"]

_HOST_AND_PORT: Final = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/\S*)?")
# Options for a tree of prompts and their defaults; refused for a server.
_PROMPT_DEFAULTS: Final[dict[str, Any]] = {
    "prompt": (),
    "model": None,
    "pages": 16_384,
    "page_size": 4,
    "prefix": "radix",
    "eviction": "lru",
    "branches": 12,
}

_EXAMPLE = (
    "You are a helpful assistant. Answer in one sentence. What does textwrap.dedent do?",
    "You are a helpful assistant. Answer in one sentence. What does textwrap.wrap do?",
    "You are a helpful assistant. Answer in one sentence. What is a generator?",
    "You are a helpful assistant. Answer in one sentence. What is a generator? And an iterator?",
    "Translate to French: good morning",
)


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "tree",
        help="draw the prefix tree of prompts, or of a running server",
        description="Draw the prefix tree of some prompts: which prefixes and pages they share, "
        "and what would be evicted first (no KV is computed). With the URL of a running kvkeep "
        "server, draw its prefix tree: sizes, hits, last uses and pins.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE|URL",
        help="file with one prompt per line, as text or a JSON array of token ids (default: some "
        "examples); or a server: http://host:port, or host:port",
    )
    shown = parser.add_argument_group("drawing")
    add_option(shown, "--depth N", "levels to draw", type=count, default=8)
    add_json(shown)
    _add_prompt_options(parser.add_argument_group("tree of prompts"))
    add_live_arguments(parser.add_argument_group("tree of a server"))
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of `_PROMPT_DEFAULTS`; None unless given."""
    group.add_argument(
        "--prompt", metavar="TEXT", action="append", help="one more prompt; may be repeated"
    )
    add_model_path(group, "model directory, for its tokenizer")
    add_option(group, "--pages N", "pages of the cache (default: 16,384)", type=count)
    add_option(group, "--page-size TOKENS", "tokens per page (default: 4)", type=count)
    group.add_argument("--prefix", choices=INDICES, help="prefix index (default: radix)")
    group.add_argument("--eviction", choices=POLICIES, help="eviction policy (default: lru)")
    add_option(group, "--branches N", "branches to draw below a node (default: 12)", type=count)


def run(args: argparse.Namespace) -> int:
    """Draw the tree of a server, or of prompts."""
    whole("--depth", args.depth, 1)
    live = args.file is not None and _is_server(args.file)
    for name in _PROMPT_DEFAULTS if live else LIVE:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidValue(
                f"{option} is for a tree of prompts; {args.file} is a server"
                if live
                else f"{option} is for the tree of a server: give its URL"
            )
    if live:
        return draw_server(args)
    for name, value in _PROMPT_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return _draw_prompts(args)


def _is_server(text: str) -> bool:
    """Whether ``text`` is a URL, or host:port and no file of that name exists."""
    if text.startswith(("http://", "https://")):
        return True
    return _HOST_AND_PORT.fullmatch(text) is not None and not Path(text).exists()


def _draw_prompts(args: argparse.Namespace) -> int:
    """Put the prompts into a cache, and draw its prefix tree."""
    lines = [*args.prompt, *(_lines(Path(args.file)) if args.file else ())] or list(_EXAMPLE)
    cache = PagedCache(args.pages, args.page_size, prefix=args.prefix, eviction=args.eviction)
    encode, decode = _tokenizer(args.model, lines)
    for line in lines:
        # The pages have no memory behind them, so the page copies are not made.
        sequence = cache.open(encode(line))
        sequence.copies()
        sequence.publish()
        sequence.close()
    stats = cache.stats()
    if args.json:
        runs = [
            {
                "depth": run.depth,
                "tokens": None if run.tokens is None else run.tokens.tolist(),
                "pages": run.pages.tolist(),
                "references": run.holders,
                "pins": run.pins,
                "policy": run.state,
            }
            for run in cache.runs()
        ]
        print(json.dumps({"runs": runs, "stats": stats.as_dict()}))
        return 0
    title = (
        f"{len(lines)} prompts, {stats.prompt_tokens} tokens, {stats.hit_tokens} reused "
        f"({stats.hit_rate:.0%}): {stats.pages_cached} pages of {cache.page_size}, "
        f"{args.prefix}, {args.eviction}"
    )
    console = require("rich.console", "cli").Console(highlight=False)
    console.print(
        draw(title, cache.runs(), depth=args.depth, branches=args.branches, decode=decode)
    )
    return 0


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} cannot be read as text: {reason(error)}") from error
    for line in text.splitlines():
        if line.strip():
            yield line


def _tokenizer(
    model: Path | None, lines: list[str]
) -> tuple[Callable[[str], TokenArray], Callable[[TokenArray], str] | None]:
    """Return functions that encode a line and decode tokens; no tokenizer for token ids alone."""
    if all(line.lstrip().startswith("[") for line in lines):
        return _token_ids, None
    require("transformers", "transformers,cli")  # the drawing needs the other
    from kvkeep.serve.engine.text import Tokenizer  # noqa: PLC0415 - seconds, for torch
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415

    tokenizer = Tokenizer.load(bundled_model() if model is None else model)
    return (
        lambda line: _token_ids(line) if line.lstrip().startswith("[") else tokenizer.encode(line),
        lambda tokens: tokenizer.decode(tokens.tolist()),
    )


def _token_ids(line: str) -> TokenArray:
    try:
        return as_tokens(json.loads(line))
    except ValueError as error:
        raise InvalidValue(f"not a JSON array of token ids: {line[:60]!r} ({error})") from error
