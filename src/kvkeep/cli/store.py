"""``kvkeep store``: look at the tiers of a store, verify them, and take things out of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvkeep.cli.numbers import count
from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends import TierURL

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvkeep.cli.model import Commands
    from kvkeep.cli.store_place import CommandResult, OpenTier

    Action = Callable[[OpenTier, argparse.Namespace], CommandResult]

__all__ = ["add_parser", "run"]

_FAILED = 1


def add_parser(commands: Commands) -> None:
    """Name the actions and their arguments."""
    store = commands.add_parser(
        "store",
        help="look at the tiers of a store, verify them, clean them up",
        description="Look at the tiers of a store and take care of them, also while others use "
        "them. A tier is named by its URL: file:///var/lib/kvkeep, valkey://host:6379, "
        "s3://bucket/prefix.",
    )
    actions = store.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = _add(actions, "ls", "what is there: one line a namespace")
    action.add_argument("--blocks", action="store_true", help="and one line a block")
    action = _add(actions, "stat", "totals, codecs, and when it was used last")
    action.add_argument(
        "--sample",
        metavar="N",
        type=count,
        default=8,
        help="read so many records, picked by chance, to see their codecs (default: 8)",
    )
    action = _add(actions, "verify", "read everything and check it; exit code 1 if it is not sound")
    action.add_argument("--repair", action="store_true", help="quarantine what is not sound")
    action.add_argument(
        "--threads", metavar="N", type=count, default=4, help="records read at once (default: 4)"
    )
    action = _add(
        actions,
        "gc",
        "remove what was not used for long, or is too much, least recently used first, and what "
        "killed writers left behind",
    )
    action.add_argument("--older", metavar="TIME", help="what was last used so long ago: 7d, 12h")
    action.add_argument(
        "--size", metavar="SIZE", help="keep this much, such as 100GiB (default: size= of the URL)"
    )
    action.add_argument("--dry-run", action="store_true", help="only say what would go")
    action = _add(actions, "rm", "remove a namespace, or everything")
    what = action.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--space", metavar="HEX", help="the namespace, as ls shows it; its first digits will do"
    )
    what.add_argument("--all", action="store_true", help="everything")
    action.add_argument("--yes", action="store_true", help="do not ask")


def _add(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("urls", metavar="URL", nargs="+", help="a tier; several are done in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run, action=name)
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it to each tier; a tier that does not answer is one line on stderr and exit code 1."""
    action = _action(args.action)
    urls = [TierURL(url) for url in args.urls]  # what is wrong with one is said before any is used
    code = 0
    answers: list[dict[str, object]] = []
    for text, url in zip(args.urls, urls, strict=True):
        try:
            answer = _done(action, text, args)
        except BackendFailed as error:
            line = " ".join(str(error).split())
            if (url.place or url.path) not in line:
                line = f"{url.safe}: {line}"
            print(f"kvkeep: error: {line}", file=sys.stderr)
            answers.append({"url": url.safe, "error": line})
            code = _FAILED
            continue
        answers.append(answer.json)
        code = max(code, answer.code)
        if not args.json:
            print("\n".join(answer.lines))
    if args.json:
        print(json.dumps({"tiers": answers}))
    return code


def _action(name: str) -> Action:
    """The function that does it. Imported now: none of this is needed for ``kvkeep --help``."""
    from kvkeep.cli import store_change, store_look  # noqa: PLC0415

    actions: dict[str, Action] = {
        "ls": store_look.ls,
        "stat": store_look.stat,
        "verify": store_change.verify,
        "gc": store_change.gc,
        "rm": store_change.rm,
    }
    return actions[name]


def _done(action: Action, url: str, args: argparse.Namespace) -> CommandResult:
    """Open the tier and do it; what a backend raises for its troubles becomes one error."""
    from kvkeep.cli.store_place import opened  # noqa: PLC0415

    try:
        with opened(url) as place:
            return action(place, args)
    except BackendFailed:
        raise
    except BrokenPipeError:
        raise  # it is our reader that has gone
    except OSError as error:
        raise BackendFailed(str(error)) from error
