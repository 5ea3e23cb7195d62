"""``kvkeep store``: list the tiers of a store, verify them, and change what is in them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_json, add_option, add_switch, byte_size, duration
from kvkeep.core.errors import BackendFailed, reason
from kvkeep.store.backends import TierURL

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.store_actions import CommandResult, OpenTier

    Action = Callable[[OpenTier, argparse.Namespace], CommandResult]

__all__ = ["add_parser", "run"]

_FAILED = 1


def add_parser(commands: Commands) -> None:
    """Add the command, its actions and their options."""
    store = commands.add_parser(
        "store",
        help="list, verify and clean up the tiers of a store",
        description="List, verify and clean up the tiers of a store, also while servers use them. "
        "A tier is named by its URL: file:///var/lib/kvkeep, valkey://host:6379, "
        "s3://bucket/prefix.",
    )
    actions = store.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = _add(actions, "ls", "list namespaces, one per line; then budget and codecs")
    add_switch(action, "--blocks", "also list blocks, one per line")
    action = _add(actions, "verify", "read and check every record; exit code 1 if any is damaged")
    add_switch(action, "--repair", "quarantine damaged records")
    action = _add(
        actions,
        "gc",
        "remove the least recently used blocks, by age or down to a size, and files that killed "
        "writers left behind",
    )
    add_option(
        action, "--older TIME", "remove blocks not used for this long: 7d, 12h", type=duration
    )
    add_option(
        action,
        "--size SIZE",
        "keep at most this much: 100GiB (default: size= of the URL)",
        type=byte_size,
    )
    add_switch(action, "--dry-run", "only print what would be removed")
    action = _add(actions, "rm", "remove a namespace, or all blocks")
    what = action.add_mutually_exclusive_group(required=True)
    add_option(
        what, "--space HEX", "namespace to remove, as ls shows it; its first digits are enough"
    )
    add_switch(what, "--all", "remove all blocks")
    add_switch(action, "--yes", "do not ask for confirmation")


def _add(actions: Commands, name: str, what: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument(
        "urls", metavar="URL", nargs="+", help="tier; several are processed in turn"
    )
    add_json(parser)
    parser.set_defaults(run=run, action=name)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the action on each tier; a failing tier gives one line on stderr, and exit code 1."""
    action = _action(args.action)
    urls = [TierURL(url) for url in args.urls]  # all URLs are checked before any is used
    code = 0
    results: list[dict[str, object]] = []
    for text, url in zip(args.urls, urls, strict=True):
        try:
            result = _done(action, text, args)
        except BackendFailed as error:
            line = " ".join(str(error).split())
            if (url.place or url.path) not in line:
                line = f"{url.safe}: {line}"
            print(f"kvkeep: error: {line}", file=sys.stderr)
            results.append({"url": url.safe, "error": line})
            code = _FAILED
            continue
        results.append(result.json)
        code = max(code, result.code)
        if not args.json:
            print("\n".join(result.lines))
    if args.json:
        print(json.dumps({"tiers": results}))
    return code


def _action(name: str) -> Action:
    """Return the function of an action, imported here to keep ``kvkeep --help`` fast."""
    from kvkeep.cli import store_actions  # noqa: PLC0415

    actions: dict[str, Action] = {
        "ls": store_actions.ls,
        "verify": store_actions.verify,
        "gc": store_actions.gc,
        "rm": store_actions.rm,
    }
    return actions[name]


def _done(action: Action, url: str, args: argparse.Namespace) -> CommandResult:
    """Open the tier and run the action; raise `BackendFailed` for any failure of the backend."""
    from kvkeep.cli.store_actions import opened  # noqa: PLC0415

    try:
        with opened(url) as place:
            return action(place, args)
    except BackendFailed:
        raise
    except BrokenPipeError:
        raise  # of our stdout, not of the backend
    except OSError as error:
        raise BackendFailed(reason(error)) from error
