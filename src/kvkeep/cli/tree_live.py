"""The other half of ``kvkeep tree``: the prefix tree that a running server has."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.numbers import count
from kvkeep.cli.watch import asking, console, path
from kvkeep.core.errors import InvalidValue, require, whole

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.client import Client

__all__ = ["LIVE", "add_live_arguments", "draw_server"]

# The arguments that are about a server; None where they were not given.
LIVE: Final = ("nodes", "salt", "root", "search", "search_tokens")
_NODES: Final = 200
_MOST_NODES: Final = 5000
_IDS: Final = re.compile(r"[0-9]{1,10}(,[0-9]{1,10})*")


def add_live_arguments(group: argparse._ArgumentGroup) -> None:
    """Name the arguments that say what of a server's tree is drawn."""
    group.add_argument(
        "--nodes",
        metavar="N",
        type=count,
        help=f"the N largest are drawn, the others counted (default: {_NODES})",
    )
    group.add_argument(
        "--salt", metavar="SALT", help="draw what is cached for this cache_salt alone"
    )
    group.add_argument(
        "--root",
        metavar="NODE",
        type=count,
        help="draw what lies below this node, and say more of it (its number is in the drawing)",
    )
    group.add_argument(
        "--search", metavar="TEXT", help="find the places that hold this text instead"
    )
    group.add_argument(
        "--search-tokens",
        metavar="IDS",
        help="find the places that hold these token ids in a row: 17,4,99",
    )


def draw_server(args: argparse.Namespace) -> int:
    """Ask the server at ``args.file``, and draw."""
    nodes = _NODES if args.nodes is None else whole("--nodes", args.nodes, 1, _MOST_NODES)
    search = _search(args)
    answer: dict[str, Any]
    detail: dict[str, Any] | None = None
    with asking(args.file, args) as client:
        if search is not None:
            answer = client.get(path("/kv/search", **search, namespace=args.salt))
        else:
            asked = path("/kv/map", namespace=args.salt, root=args.root, nodes=nodes)
            answer = client.get(asked)
            detail = None if args.root is None else _detail(client, args.root)
    if args.json:
        print(json.dumps(answer if detail is None else {**answer, "root": detail}))
        return 0
    require("rich", "cli")
    from kvkeep.cli import tree_view as view  # noqa: PLC0415 - rich comes with an extra

    screen = console()
    width = max(screen.width, 60)
    if search is not None:
        lines = view.matches(answer, width)
    else:
        head = [] if detail is None else view.detail(detail, width)
        lines = [*head, *view.tree(answer, width, args.depth)]
    for line in lines:
        line.rstrip()
        screen.print(line)
    return 0


def _search(args: argparse.Namespace) -> dict[str, str] | None:
    """What is looked for, as the server is asked for it; None where the tree is drawn."""
    if args.search is None and args.search_tokens is None:
        return None
    if args.search is not None and args.search_tokens is not None:
        raise InvalidValue("--search takes a text and --search-tokens ids: give one of them")
    for name in ("root", "nodes"):
        if getattr(args, name) is not None:
            raise InvalidValue(f"--{name} is about drawing; leave it out of a search")
    if args.search is not None:
        if not args.search:
            raise InvalidValue("--search looks for a text, and this one is empty")
        return {"q": args.search}
    if _IDS.fullmatch(args.search_tokens) is None:
        raise InvalidValue(
            f"--search-tokens are ids with commas between: 17,4,99; got {args.search_tokens[:60]!r}"
        )
    return {"tokens": args.search_tokens}


def _detail(client: Client, node: int) -> dict[str, Any]:
    return client.get(path("/kv/map", str(node)))
