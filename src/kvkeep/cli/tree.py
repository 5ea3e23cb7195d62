"""``kvkeep tree``: see what prompts share: the prefix tree that they make, as text.

Of prompts of one's own, which are put into a cache of page ids, or of a running server.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.numbers import count
from kvkeep.cli.tree_live import LIVE, add_live_arguments, draw_server
from kvkeep.cli.watch import add_server_arguments
from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, require, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.prefix import INDICES
from kvkeep.core.prefix.render import draw
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvkeep.cli.model import Commands
    from kvkeep.core.tokens import TokenArray

__all__ = ["add_parser", "run"]

_HOST_AND_PORT: Final = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/\S*)?")
# What is said of prompts of one's own, and what it is where nothing is said.
_OWN: Final[dict[str, Any]] = {
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
    """Name the arguments."""
    parser = commands.add_parser(
        "tree",
        help="draw the prefix tree that prompts make, or that a running server has",
        description="Put prompts into a cache of page ids alone (nothing is computed) and draw the "
        "prefix tree: what they share, in which pages, and what would be evicted first. With the "
        "URL of a running kvkeep server, draw what that one has: how much lies where, how often "
        "and how lately it was used, what is pinned.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE|URL",
        help="one prompt a line: text, or a JSON array of token ids (default: a few examples); or "
        "a server: http://host:port, or host:port",
    )
    shown = parser.add_argument_group("drawing")
    shown.add_argument("--depth", metavar="N", type=int, default=8, help="runs deep (default: 8)")
    shown.add_argument("--json", action="store_true", help="print one JSON object instead")
    _of_ones_own(parser)
    add_live_arguments(parser.add_argument_group("what a server has"))
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def _of_ones_own(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("prompts of one's own")
    own.add_argument(
        "--prompt", metavar="TEXT", action="append", help="one more; can be given several times"
    )
    own.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        help="a model directory, for its tokenizer (default: the tiny model that kvkeep ships)",
    )
    own.add_argument("--pages", metavar="N", type=count, help="of the cache (default: 16384)")
    own.add_argument("--page-size", metavar="TOKENS", type=count, help="of a page (default: 4)")
    own.add_argument("--prefix", choices=INDICES, help="how prefixes are found (default: radix)")
    own.add_argument("--eviction", choices=POLICIES, help="what goes first (default: lru)")
    own.add_argument("--branches", metavar="N", type=int, help="drawn of a run (default: 12)")


def run(args: argparse.Namespace) -> int:
    """Draw what a server has, or what prompts make."""
    whole("--depth", args.depth, 1)
    live = args.file is not None and _is_server(args.file)
    for name in _OWN if live else LIVE:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidValue(
                f"{option} is about prompts of one's own; {args.file} is a server"
                if live
                else f"{option} is about a server: give its URL"
            )
    if live:
        return draw_server(args)
    for name, value in _OWN.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return _draw_own(args)


def _is_server(text: str) -> bool:
    """A URL, or host:port where no file is called so."""
    if text.startswith(("http://", "https://")):
        return True
    return _HOST_AND_PORT.fullmatch(text) is not None and not Path(text).exists()


def _draw_own(args: argparse.Namespace) -> int:
    """Read, store, draw."""
    lines = [*args.prompt, *(_lines(Path(args.file)) if args.file else ())] or list(_EXAMPLE)
    cache = PagedCache(args.pages, args.page_size, prefix=args.prefix, eviction=args.eviction)
    encode, decode = _tokenizer(args.model, lines)
    for line in lines:
        # The pages belong to no memory: copies that would complete them need not be made.
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
        raise InvalidValue(f"{path} cannot be read as text: {error}") from error
    for line in text.splitlines():
        if line.strip():
            yield line


def _tokenizer(
    model: Path | None, lines: list[str]
) -> tuple[Callable[[str], TokenArray], Callable[[TokenArray], str] | None]:
    """How to read a line, and how to show tokens; no tokenizer is loaded for token ids."""
    if all(line.lstrip().startswith("[") for line in lines):
        return _token_ids, None
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
