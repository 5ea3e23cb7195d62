"""``kvkeep explain``: why the tokens of a prompt were computed, as a running server saw it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kvkeep.cli.client import ServerRefusal
from kvkeep.cli.drawing import visible
from kvkeep.cli.numbers import count
from kvkeep.cli.watch import add_server_arguments, asking, console, entries, path
from kvkeep.core.errors import InvalidValue, require
from kvkeep.core.errors import whole as integer

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.client import Client
    from kvkeep.cli.model import Commands

__all__ = ["add_parser", "run"]

_MOST_BYTES: Final = 8 << 20  # of a body, for the server
_REMEMBERED: Final = 1000  # requests that are looked through for the beginning of an id


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "explain",
        help="say why the tokens of a request were not reused, or what costs most of all",
        description="Ask a running kvkeep server why tokens were computed and not reused: of one "
        "request (its id is in the answer that its client got, and in kvkeep top), of a prompt as "
        "if it came now, or, with neither, what cost most in the last requests.",
    )
    parser.add_argument("url", metavar="URL", help="of the server: http://host:port, or host:port")
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="of a request, as in the answer of the API (cmpl-…, chatcmpl-…); its beginning, with "
        "or without that word, is enough where no other begins so",
    )
    prompt = parser.add_argument_group("a prompt instead, which is not computed")
    prompt.add_argument("--prompt", metavar="TEXT", help="as /v1/completions takes it")
    prompt.add_argument(
        "--file",
        metavar="FILE",
        type=Path,
        help="a prompt in a file (-: standard input): text, a JSON array of token ids or of "
        "messages, or the JSON object that a client sends to the API",
    )
    prompt.add_argument(
        "--salt", metavar="SALT", help="the cache_salt that it would come with (default: none)"
    )
    parser.add_argument(
        "--last",
        metavar="N",
        type=count,
        help="requests that the summary is about (default: 1000, as far as they are remembered)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the server's answer as one JSON object"
    )
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and say it."""
    prompted = args.prompt is not None or args.file is not None
    if prompted + (args.id is not None) > 1 or (args.prompt is not None and args.file is not None):
        raise InvalidValue(
            "an ID, --prompt and --file are three ways to name one: give one of them"
        )
    if args.salt is not None and not prompted:
        raise InvalidValue("--salt goes with --prompt or --file; a request has its own")
    if args.last is not None and (prompted or args.id is not None):
        raise InvalidValue("--last says how many requests a summary is about; leave it out here")
    if args.last is not None:
        integer("--last", args.last, 1, _REMEMBERED)
    if args.id is not None and not args.id.strip():
        raise InvalidValue("the ID is empty; kvkeep top shows those of the last requests")
    body = _body(args) if prompted else None
    with asking(args.url, args) as client:
        if body is not None:
            answer = client.post("/kv/explain", body)
        elif args.id is not None:
            answer = _request(client, args.id.strip())
        else:
            answer = client.get(path("/kv/summary", last=args.last))
    if args.json:
        print(json.dumps(answer))
        return 0
    require("rich", "cli")
    from kvkeep.cli import explain_view as view  # noqa: PLC0415 - rich comes with an extra

    screen = console()
    about_one = body is not None or args.id is not None
    draw = view.explanation if about_one else view.summary
    for line in draw(answer, max(screen.width, 60)):
        line.rstrip()
        screen.print(line)
    return 0


def _request(client: Client, name: str) -> dict[str, Any]:
    """The explanation of a request, by its id or the beginning of it."""
    try:
        return client.get(path("/kv/explain", quote(name, safe="")))
    except ServerRefusal as error:
        if error.status != 404:
            raise
        try:
            seen = client.get(path("/kv/requests", last=_REMEMBERED))
        except ServerRefusal:
            raise error from None  # nothing is explained there at all
        ids = [one["id"] for one in entries(seen, "requests") if isinstance(one.get("id"), str)]
        found = [
            one for one in ids if one.startswith(name) or one.partition("-")[2].startswith(name)
        ]
        if not found:
            raise
        if len(found) > 1:
            raise InvalidValue(
                f"{len(found)} requests begin with {visible(name)}: write more of the id, such as "
                f"{visible(found[0])}"
            ) from error
    return client.get(path("/kv/explain", quote(found[0], safe="")))


# --- a prompt -------------------------------------------------------------------------------------


def _body(args: argparse.Namespace) -> dict[str, Any]:
    """What is posted, for ``--prompt`` or ``--file``."""
    body = {"prompt": args.prompt} if args.file is None else _asked(_read(args.file), args.file)
    if args.salt is not None:
        body["cache_salt"] = args.salt
    return body


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            read = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with file.open("rb") as opened:
                read = opened.read(_MOST_BYTES + 1)
        text = read.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} cannot be read as text: {error}") from error
    if len(read) > _MOST_BYTES:
        raise InvalidValue(f"{file} has more than {_MOST_BYTES:,} bytes, which no server takes")
    return text


def _asked(text: str, file: Path) -> dict[str, Any]:
    """The prompt that a file holds: what is no JSON array or object is text, as it stands."""
    try:
        found = json.loads(text) if text.lstrip()[:1] in {"[", "{"} else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and found:
        if all(isinstance(one, dict) for one in found):
            return {"messages": found}
        if all(type(one) is int for one in found):
            return {"prompt": found}
    if isinstance(found, dict) and {"prompt", "messages"} & found.keys():
        named = {"prompt", "messages", "cache_salt"}
        return {name: value for name, value in found.items() if name in named}
    if not text:
        raise InvalidValue(f"{file} is empty; a prompt is needed")
    return {"prompt": text}
