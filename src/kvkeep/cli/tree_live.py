"""``kvkeep tree URL``: the prefix tree of a running server."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.arguments import add_option, count
from kvkeep.cli.server import connect, path
from kvkeep.cli.tables import console, print_lines
from kvkeep.core.errors import InvalidValue, require, whole

if TYPE_CHECKING:
    import argparse

__all__ = ["LIVE", "add_live_arguments", "draw_server"]

# Options for the tree of a server; None unless given.
LIVE: Final = ("nodes", "salt", "root", "search", "search_tokens")
_NODES: Final = 200
_MOST_NODES: Final = 5000
_IDS: Final = re.compile(r"[0-9]{1,10}(,[0-9]{1,10})*")


def add_live_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options of `LIVE`."""
    add_option(
        group,
        "--nodes N",
        f"nodes to draw, largest first; the others are counted (default: {_NODES})",
        type=count,
    )
    add_option(group, "--salt SALT", "draw only what is cached under this cache_salt")
    add_option(
        group,
        "--root NODE",
        "draw the tree below this node, with details of it (numbers are in the drawing)",
        type=count,
    )
    add_option(group, "--search TEXT", "list the nodes that contain this text instead")
    add_option(
        group,
        "--search-tokens IDS",
        "list the nodes that contain these token ids in sequence: 17,4,99",
    )


def draw_server(args: argparse.Namespace) -> int:
    """Get the tree of the server at ``args.file``, and draw it."""
    nodes = _NODES if args.nodes is None else whole("--nodes", args.nodes, 1, _MOST_NODES)
    search = _search(args)
    answer: dict[str, Any]
    detail: dict[str, Any] | None = None
    with connect(args.file, args) as client:
        if search is not None:
            answer = client.get(path("/kv/search", **search, namespace=args.salt))
        else:
            query = path("/kv/map", namespace=args.salt, root=args.root, nodes=nodes)
            answer = client.get(query)
            detail = None if args.root is None else client.get(path("/kv/map", str(args.root)))
    if args.json:
        print(json.dumps(answer if detail is None else {**answer, "root": detail}))
        return 0
    require("rich", "cli")
    from kvkeep.cli import tree_view as view  # noqa: PLC0415 - rich is optional

    screen = console()
    width = max(screen.width, 60)
    if search is not None:
        lines = view.matches(answer, width)
    else:
        head = [] if detail is None else view.detail(detail, width)
        lines = [*head, *view.tree(answer, width, args.depth)]
    print_lines(screen, lines)
    return 0


def _search(args: argparse.Namespace) -> dict[str, str] | None:
    """Return the query of a search; None to draw the tree."""
    if args.search is None and args.search_tokens is None:
        return None
    if args.search is not None and args.search_tokens is not None:
        raise InvalidValue("--search takes text and --search-tokens takes ids: give one of them")
    for name in ("root", "nodes"):
        if getattr(args, name) is not None:
            raise InvalidValue(f"--{name} is for drawing; leave it out of a search")
    if args.search is not None:
        if not args.search:
            raise InvalidValue("--search is empty; a text is needed")
        return {"q": args.search}
    if _IDS.fullmatch(args.search_tokens) is None:
        raise InvalidValue(
            "--search-tokens takes ids separated by commas: 17,4,99; got "
            f"{args.search_tokens[:60]!r}"
        )
    return {"tokens": args.search_tokens}
