"""``kvkeep tree``: the prefix tree of some prompts, or of a running server, as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvkeep.cli.arguments import add_json, add_option, count
from kvkeep.cli.client import add_server_arguments, connect, path
from kvkeep.core.errors import InvalidValue, reason, require, whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvkeep.cli.arguments import Commands
    from kvkeep.core.tokens import TokenArray

__all__ = ["add_parser", "run"]

_HOST_AND_PORT: Final = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/\S*)?")
_NODES: Final = 200  # of a server, largest first; the others are counted
_PAGES: Final = 16_384
_PAGE_SIZE: Final = 4
_EXAMPLE: Final = (
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
        "server, draw its prefix tree: sizes, hits, references and pins.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE|URL",
        help="file with one prompt per line, as text or a JSON array of token ids (default: some "
        "examples); or a server: http://host:port, or host:port",
    )
    add_option(parser, "--depth N", "levels to draw", type=count, default=8)
    add_option(parser, "--page-size TOKENS", "of prompts: tokens per page (default: 4)", type=count)
    add_option(parser, "--salt SALT", "of a server: only what is cached under this cache_salt")
    add_json(parser)
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the tree of a server, or of prompts."""
    whole("--depth", args.depth, 1)
    if args.file is not None and _is_server(args.file):
        if args.page_size is not None:
            raise InvalidValue(f"--page-size is for a tree of prompts; {args.file} is a server")
        return _draw_server(args)
    if args.salt is not None:
        raise InvalidValue("--salt is for the tree of a server: give its URL")
    return _draw_prompts(args)


def _is_server(text: str) -> bool:
    """Whether ``text`` is a URL, or host:port and no file of that name exists."""
    if text.startswith(("http://", "https://")):
        return True
    return _HOST_AND_PORT.fullmatch(text) is not None and not Path(text).exists()


def _draw_server(args: argparse.Namespace) -> int:
    with connect(args.file, args) as client:
        answer = client.get(path("/kv/map", namespace=args.salt, nodes=_NODES))
    if args.json:
        print(json.dumps(answer))
        return 0
    require("rich", "cli")
    from kvkeep.cli.tables import console, print_lines  # noqa: PLC0415 - rich is optional
    from kvkeep.cli.tree_view import tree  # noqa: PLC0415

    screen = console()
    print_lines(screen, tree(answer, max(screen.width, 60), args.depth))
    return 0


def _draw_prompts(args: argparse.Namespace) -> int:
    """Put the prompts into a cache, and draw its prefix tree."""
    from kvkeep.core.cache import PagedCache  # noqa: PLC0415 - not for the help
    from kvkeep.core.prefix.render import draw  # noqa: PLC0415

    lines = list(_lines(Path(args.file))) if args.file else list(_EXAMPLE)
    cache = PagedCache(_PAGES, _PAGE_SIZE if args.page_size is None else args.page_size)
    encode, decode = _tokenizer(lines)
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
        f"({stats.hit_rate:.0%}): {stats.pages_cached} pages of {cache.page_size}"
    )
    console = require("rich.console", "cli").Console(highlight=False)
    console.print(draw(title, cache.runs(), depth=args.depth, decode=decode))
    return 0


def _lines(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} cannot be read as text: {reason(error)}") from error
    for line in text.splitlines():
        if line.strip():
            yield line


def _tokenizer(
    lines: list[str],
) -> tuple[Callable[[str], TokenArray], Callable[[TokenArray], str] | None]:
    """Return functions that encode a line and decode tokens; no tokenizer for token ids alone."""
    if all(line.lstrip().startswith("[") for line in lines):
        return _token_ids, None
    require("transformers", "transformers,cli")  # the drawing needs the other
    from kvkeep.serve.engine.text import Tokenizer  # noqa: PLC0415 - seconds, for torch
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415

    tokenizer = Tokenizer.load(bundled_model())
    return (
        lambda line: _token_ids(line) if line.lstrip().startswith("[") else tokenizer.encode(line),
        lambda tokens: tokenizer.decode(tokens.tolist()),
    )


def _token_ids(line: str) -> TokenArray:
    from kvkeep.core.tokens import as_tokens  # noqa: PLC0415 - not for the help

    try:
        return as_tokens(json.loads(line))
    except ValueError as error:
        raise InvalidValue(f"not a JSON array of token ids: {line[:60]!r} ({error})") from error
