"""``kvkeep tree URL``: the prefix tree of a running server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.arguments import add_option, count
from kvkeep.cli.server import connect, path
from kvkeep.cli.tables import console, print_lines
from kvkeep.core.errors import require, whole

if TYPE_CHECKING:
    import argparse

__all__ = ["LIVE", "add_live_arguments", "draw_server"]

# Options for the tree of a server; None unless given.
LIVE: Final = ("nodes", "salt", "root")
_NODES: Final = 200
_MOST_NODES: Final = 5000


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


def draw_server(args: argparse.Namespace) -> int:
    """Get the tree of the server at ``args.file``, and draw it."""
    nodes = _NODES if args.nodes is None else whole("--nodes", args.nodes, 1, _MOST_NODES)
    query = path("/kv/map", namespace=args.salt, root=args.root, nodes=nodes)
    detail: dict[str, Any] | None = None
    with connect(args.file, args) as client:
        answer: dict[str, Any] = client.get(query)
        if args.root is not None:
            detail = client.get(path("/kv/map", str(args.root)))
    if args.json:
        print(json.dumps(answer if detail is None else {**answer, "root": detail}))
        return 0
    require("rich", "cli")
    from kvkeep.cli import tree_view as view  # noqa: PLC0415 - rich is optional

    screen = console()
    width = max(screen.width, 60)
    head = [] if detail is None else view.detail(detail, width)
    print_lines(screen, [*head, *view.tree(answer, width, args.depth)])
    return 0
