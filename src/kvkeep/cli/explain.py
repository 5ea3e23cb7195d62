"""``kvkeep explain``: why a running server computed the tokens of a prompt."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kvkeep.cli.arguments import add_json, add_option, add_path, count
from kvkeep.cli.client import (
    ServerRefusal,
    add_server_arguments,
    add_server_url,
    connect,
    entries,
    path,
)
from kvkeep.cli.drawing import visible
from kvkeep.cli.tables import console, print_lines
from kvkeep.core.errors import InvalidValue, reason, require, whole

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.client import Client

__all__ = ["add_parser", "run"]

_MOST_BYTES: Final = 8 << 20  # the server's limit for a body
_REMEMBERED: Final = 1000  # requests that the server remembers


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "explain",
        help="explain why tokens of a request were not reused, or summarise the causes",
        description="Ask a running kvkeep server why tokens were computed instead of reused: for a "
        "request, by its id in the API's answer or in kvkeep top; for a prompt, as if it were sent "
        "now; or, without either, the main causes in the latest requests.",
    )
    add_server_url(parser)
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="id of a request, as in the API's answer (cmpl-…, chatcmpl-…), or a unique beginning "
        "of it, with or without cmpl-",
    )
    prompt = parser.add_argument_group("a prompt instead of a request; it is not computed")
    add_option(prompt, "--prompt TEXT", "text of the prompt, as for /v1/completions")
    add_path(
        prompt,
        "--file",
        "file that holds the prompt (-: standard input): text, a JSON array of token ids or of "
        "messages, or the JSON body of an API request",
    )
    add_option(prompt, "--salt SALT", "cache_salt of the prompt (default: none)")
    add_option(
        parser,
        "--last N",
        "requests to summarise (default: all that the server remembers, at most 1,000)",
        type=count,
    )
    add_json(parser, "print the server's answer as one JSON object instead of text")
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server, and print the explanation."""
    prompted = args.prompt is not None or args.file is not None
    if prompted + (args.id is not None) > 1 or (args.prompt is not None and args.file is not None):
        raise InvalidValue("an ID, --prompt and --file exclude each other: give one of them")
    if args.salt is not None and not prompted:
        raise InvalidValue("--salt needs --prompt or --file; a request has its own cache_salt")
    if args.last is not None and (prompted or args.id is not None):
        raise InvalidValue("--last is for a summary; leave it out with an ID or a prompt")
    if args.last is not None:
        whole("--last", args.last, 1, _REMEMBERED)
    if args.id is not None and not args.id.strip():
        raise InvalidValue("the ID is empty; kvkeep top shows the ids of the latest requests")
    body = _body(args) if prompted else None
    with connect(args.url, args) as client:
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
    from kvkeep.cli import explain_view as view  # noqa: PLC0415 - rich is optional

    screen = console()
    about_one = body is not None or args.id is not None
    draw = view.explanation if about_one else view.summary
    print_lines(screen, draw(answer, max(screen.width, 60)))
    return 0


def _request(client: Client, name: str) -> dict[str, Any]:
    """Get the explanation of a request, by its id or the beginning of its id."""
    try:
        return client.get(path("/kv/explain", quote(name, safe="")))
    except ServerRefusal as error:
        if error.status != 404:
            raise
        seen = client.get(path("/kv/requests", last=_REMEMBERED))
        ids = [one["id"] for one in entries(seen, "requests") if isinstance(one.get("id"), str)]
        found = [
            one for one in ids if one.startswith(name) or one.partition("-")[2].startswith(name)
        ]
        if not found:
            raise
        if len(found) > 1:
            raise InvalidValue(
                f"{len(found)} ids begin with {visible(name)}: write more of the id, such as "
                f"{visible(found[0])}"
            ) from error
    return client.get(path("/kv/explain", quote(found[0], safe="")))


# --- a prompt -------------------------------------------------------------------------------------


def _body(args: argparse.Namespace) -> dict[str, Any]:
    """Return the body to post, for ``--prompt`` or ``--file``."""
    body = {"prompt": args.prompt} if args.file is None else _parsed(_read(args.file), args.file)
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
        raise InvalidValue(f"{file} cannot be read as text: {reason(error)}") from error
    if len(read) > _MOST_BYTES:
        raise InvalidValue(f"{file} has more than {_MOST_BYTES:,} bytes, the limit of a request")
    return text


def _parsed(text: str, file: Path) -> dict[str, Any]:
    """Return the prompt in a file; anything but a JSON array or object is plain text."""
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
