"""``kvkeep store tiers``, ``attach`` and ``detach``: the tiers of a running server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvkeep.cli.arguments import add_json, add_option, add_seconds, add_switch
from kvkeep.cli.drawing import amount, storage, visible
from kvkeep.cli.replies import entries, text, whole
from kvkeep.cli.server import add_server_arguments, add_server_url, connect, path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvkeep.cli.arguments import Commands

__all__ = ["add_actions"]

_HEAD = ("tier", "blocks", "used", "budget", "codec", "breaker", "place")
_EXTRA_S = 10.0  # that a server may take beyond --wait


def add_actions(actions: Commands) -> None:
    """Add the actions to those of ``kvkeep store``."""
    action = _add(actions, "tiers", "show the tiers of a running server")
    action.set_defaults(run=_tiers)
    action = _add(
        actions, "attach", "open a tier in a running server, which uses it from now on",
        more="The server needs an API key. Prints its tiers.",
    )  # fmt: skip
    action.add_argument("tier", metavar="TIER", help="URL of the tier, as kvkeep serve --tier")
    add_option(action, "--below NAME", "the tier above it (default: it is the lowest)")
    action.set_defaults(run=_attach)
    action = _add(
        actions, "detach", "let a running server use a tier no longer",
        more="What the tier stores stays in its place; what it alone has is copied to other "
        "tiers first, as far as they have room. The server needs an API key.",
    )  # fmt: skip
    action.add_argument("name", metavar="NAME", help="name of the tier, as kvkeep store tiers")
    add_switch(action, "--no-move", "copy nothing to other tiers")
    add_seconds(action, "--wait", 60.0, "time for queued writes, copies and reads that run")
    action.set_defaults(run=_detach)


def _add(actions: Commands, name: str, what: str, *, more: str = "") -> argparse.ArgumentParser:
    said = f"{what[0].upper()}{what[1:]}. {more}".strip()
    parser = actions.add_parser(name, help=f"{what}", description=said)
    add_server_url(parser)
    add_json(parser, "print the server's answer as one JSON object instead of a table")
    add_server_arguments(parser)
    return parser


def _tiers(args: argparse.Namespace) -> int:
    with connect(args.url, args) as client:
        _print(client.get("/kv/tiers"), args)
    return 0


def _attach(args: argparse.Namespace) -> int:
    body = {"url": args.tier} | ({} if args.below is None else {"below": args.below})
    with connect(args.url, args) as client:
        _print(client.post("/kv/tiers", body), args)
    return 0


def _detach(args: argparse.Namespace) -> int:
    args.timeout = min(3600.0, max(args.timeout, args.wait + _EXTRA_S))
    move = "false" if args.no_move else "true"
    place = path("/kv/tiers", quote(args.name, safe=""), move=move, timeout_s=str(args.wait))
    with connect(args.url, args) as client:
        answer = client.delete(place)
    if not args.json:
        moved, left = whole(answer, "moved"), whole(answer, "left")
        size = storage(whole(answer, "moved_bytes"))
        print(f"{visible(args.name)} is detached: {moved:,} blocks ({size}) copied to other tiers,"
              f" {left:,} only left in its place")  # fmt: skip
    _print(answer, args)
    return 0


def _print(answer: Mapping[str, Any], args: argparse.Namespace) -> None:
    rows = entries(answer, "tiers")
    if args.json:
        print(json.dumps(answer))
    else:
        from kvkeep.cli.store_place import columns  # noqa: PLC0415 - imports NumPy

        print("\n".join(columns([_HEAD, *(_cells(row) for row in rows)])))


def _cells(row: Mapping[str, Any]) -> list[str]:
    def bytes_of(name: str) -> str:
        return "–" if row.get(name) is None else storage(whole(row, name))

    blocks = "–" if row.get("blocks") is None else amount(whole(row, "blocks"))
    name, *said = (visible(text(row, field)) for field in ("name", "codec", "breaker", "place"))
    return [name, blocks, bytes_of("used_bytes"), bytes_of("capacity"), *said]
