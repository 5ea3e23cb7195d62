"""``kvkeep route``: a reverse proxy that sends each prompt to the server that has it cached."""

from __future__ import annotations

import gc
import logging
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import (
    add_option,
    add_path,
    add_seconds,
    count,
    number,
)
from kvkeep.cli.client import KEY_VARIABLE, api_key
from kvkeep.cli.serve_options import (
    add_address,
    add_log_level,
    add_public_prefixes,
    allowed_hosts,
)
from kvkeep.core.errors import InvalidValue, require
from kvkeep.core.public import NoTokenizer, PublicPrefixes, read_prefixes

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from kvkeep.cli.arguments import Commands
    from kvkeep.serve.engine import Tokenizer
    from kvkeep.serve.kv_events import Source
    from kvkeep.serve.router import RoutingCost
    from kvkeep.serve.router.health import Timeouts
    from kvkeep.serve.router.membership import EventAddresses
    from kvkeep.serve.router.prompts import Tokenize

__all__ = ["add_parser", "run"]

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "route",
        help="send each prompt to the server that has most of it cached",
        description="A reverse proxy in front of several OpenAI-compatible servers (kvkeep serve, "
        "vLLM) of one model. It follows their KV events and sends each prompt to the server that "
        "will finish its prefill first: the one with the longest cached prefix, unless its queue "
        "is too long.",
    )
    parser.add_config("route")
    _add_instances(parser.add_argument_group("instances"))
    _add_events(parser.add_argument_group("KV events, in the order of the instances"))
    add_path(
        parser,
        "--model",
        "tokenize in the router, with the tokenizer of this model directory (default: texts are "
        "compared as they are)",
        metavar="PATH",
    )
    add_public_prefixes(parser)
    costs = parser.add_argument_group("cost of a prompt")
    add_option(
        costs,
        "--prefill-speed N",
        "tokens per second of a prompt (default: 15,000, an 8-billion-parameter model on one large "
        "GPU)",
        type=number,
    )
    _add_timeouts(parser.add_argument_group("instances that do not answer"))
    limits = parser.add_argument_group("limits")
    add_seconds(limits, "--drain-timeout", 30.0, "time for running requests to end on SIGTERM")
    access = parser.add_argument_group("address")
    add_address(access, port=8080)
    add_path(
        access,
        "--api-key-file",
        "file that holds the key that /metrics and the instances in /health need (default: "
        f"${KEY_VARIABLE}, else none); requests are forwarded with the keys of their clients",
    )
    add_log_level(parser)
    parser.set_defaults(run=run, check=check)


def _add_instances(instances: argparse._ArgumentGroup) -> None:
    add_option(
        instances, "--instances URL,…", "servers to route to, each http://HOST:PORT", default=""
    )
    instances.add_argument(
        "--discover",
        metavar="dns://NAME:PORT",
        action="append",
        default=[],
        help="route to a server at each address of a name, such as a headless service; may be "
        "repeated",
    )


def _add_events(events: argparse._ArgumentGroup) -> None:
    add_option(
        events,
        "--events ADDRESS,…",
        "address of each instance's KV events, tcp://HOST:PORT; empty for an instance without. Or "
        "one pattern for all: tcp://{host}:5557, with {host} and {port} of the instance's URL",
        default="",
    )
    add_option(
        events,
        "--replay ADDRESS,…",
        "address where each instance resends missed events, or a pattern; empty for an instance "
        "without",
        default="",
    )
    add_option(
        events,
        "--ranks N",
        "data-parallel ranks per instance, on consecutive ports",
        type=count,
        default=1,
    )


def _add_timeouts(waits: argparse._ArgumentGroup) -> None:
    add_seconds(
        waits, "--first-byte-timeout", 600.0, "time until an answer begins, prefill included"
    )
    add_seconds(waits, "--idle-timeout", 300.0, "time between two pieces of an answer")


def check(args: argparse.Namespace) -> None:
    """Raise `InvalidValue` for options that `run` refuses. Opens nothing."""
    require("zmq", "router")
    require("httpx", "router")
    require("starlette", "router")
    require("uvicorn", "router")
    require("prometheus_client", "router")
    from kvkeep.serve import http  # noqa: PLC0415
    from kvkeep.serve.router import PrefixRouter  # noqa: PLC0415
    from kvkeep.serve.router.membership import DnsName  # noqa: PLC0415
    from kvkeep.serve.router.upstreams import Upstreams  # noqa: PLC0415

    http.check_port(args.port)
    api_key(args.api_key_file)
    _timeouts(args)
    names = _listed(args.instances) if args.instances else []
    for name in args.discover:
        DnsName(name)
    Upstreams(names)
    addresses = _addresses(args, names)
    for name in names:
        addresses.sources(name)
    PrefixRouter(names, cost=_cost(args), ranks=args.ranks)
    if not names and not args.discover:
        raise InvalidValue(
            "give --instances, or --discover, or both: there is no server to route to"
        )


def run(args: argparse.Namespace) -> int:
    """Route until a signal; return 0 after an orderly shutdown."""
    check(args)
    from kvkeep.serve import http  # noqa: PLC0415
    from kvkeep.serve.kv_events import EventReader  # noqa: PLC0415
    from kvkeep.serve.router import PrefixRouter  # noqa: PLC0415
    from kvkeep.serve.router.listening import serve  # noqa: PLC0415
    from kvkeep.serve.router.membership import DnsName, Membership  # noqa: PLC0415
    from kvkeep.serve.router.proxy import create_proxy  # noqa: PLC0415
    from kvkeep.serve.router.upstreams import Upstreams  # noqa: PLC0415

    timeouts = _timeouts(args)
    http.raise_file_limit()
    limits = http.ConnectionLimits(most=http.connections_for(files_each=2))
    names = _listed(args.instances) if args.instances else []
    discovered = [DnsName(name) for name in args.discover]
    upstreams = Upstreams(names)
    addresses = _addresses(args, names)
    tokenizer = None if args.model is None else _tokenizer(args.model)
    router = PrefixRouter(
        names,
        cost=_cost(args),
        ranks=args.ranks,
        public=_public(args.public_prefixes, tokenizer),
    )
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    for noisy in ("uvicorn", "httpx", "httpcore"):  # httpx logs a line per request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with http.bind(args.host, args.port) as bound:
        sources = [source for name in names for source in addresses.sources(name)]
        reader = EventReader(sources, router)
        try:
            membership = Membership(
                router, upstreams, reader, addresses=addresses, names=discovered
            )
            proxy = create_proxy(
                router,
                upstreams,
                reader,
                tokenize=None if tokenizer is None else _tokenize(tokenizer),
                hosts=allowed_hosts(args.host, args.allow_host, _LOOPBACK),
                timeouts=timeouts,
                membership=membership,
                api_key=api_key(args.api_key_file),
            )
            # Modules and tokenizer stay: no full collection of garbage has to look through them.
            gc.freeze()
            serve(
                proxy,
                bound,
                limits=limits,
                ready=lambda url: _announce(url, names, sources, args.discover),
                drain_s=args.drain_timeout,
            )
        finally:
            reader.close()
    return 0


def _listed(text: str) -> list[str]:
    return [one.strip().rstrip("/") for one in text.split(",")]


def _addresses(args: argparse.Namespace, names: list[str]) -> EventAddresses:
    """Return where instances publish: by a pattern, or one address for each of ``names``."""
    from kvkeep.serve.router.membership import EventAddresses  # noqa: PLC0415

    both = ((args.events, "--events"), (args.replay, "--replay"))
    if args.replay and not args.events:
        raise InvalidValue("--replay needs --events")
    given = [text for text, _ in both if text]
    if given and all("{host}" in text or "{port}" in text for text in given):
        return EventAddresses(events=args.events, replay=args.replay, ranks=args.ranks)
    columns = []
    for text, option in both:
        column = _listed(text) if text else [""] * len(names)
        if len(column) != len(names):
            raise InvalidValue(
                f"{option} needs an address for each of the {len(names)} instances, got "
                f"{len(column)}; leave an address empty for an instance without, or give one "
                "pattern for all, such as tcp://{host}:5557"
            )
        columns.append(column)
    if args.discover and given:
        raise InvalidValue(
            "instances that are discovered need a pattern for --events and --replay, such as "
            "tcp://{host}:5557"
        )
    listed = dict(zip(names, zip(*columns, strict=True), strict=True))
    return EventAddresses(listed=listed, ranks=args.ranks)


def _cost(args: argparse.Namespace) -> RoutingCost:
    from kvkeep.serve.router import RoutingCost  # noqa: PLC0415

    cost = RoutingCost()
    if args.prefill_speed is None:
        return cost
    if not 0 < args.prefill_speed < math.inf:
        raise InvalidValue(f"--prefill-speed is {args.prefill_speed}; a number above 0 is needed")
    return replace(cost, prefill=replace(cost.prefill, seconds_per_token=1 / args.prefill_speed))


def _timeouts(args: argparse.Namespace) -> Timeouts:
    from kvkeep.serve.router.health import Timeouts  # noqa: PLC0415

    for option in ("first_byte_timeout", "idle_timeout", "drain_timeout"):
        seconds = getattr(args, option)
        if not 0 < seconds < math.inf:
            name = option.replace("_", "-")
            raise InvalidValue(f"--{name} is {seconds}; a number of seconds above 0 is needed")
    return Timeouts(first_byte_s=args.first_byte_timeout, idle_s=args.idle_timeout)


def _public(file: Path | None, tokenizer: Tokenizer | None) -> PublicPrefixes:
    """Return the prefixes in ``file``; texts need ``--model``. Raises `InvalidValue`."""
    if file is None:
        return PublicPrefixes()
    try:
        return PublicPrefixes(read_prefixes(file, tokenizer))
    except NoTokenizer as error:
        raise InvalidValue(f"{error}; or give --model, which tokenizes in the router") from error


def _tokenizer(path: Path) -> Tokenizer:
    from kvkeep.serve.engine import Tokenizer  # noqa: PLC0415 - seconds, for torch

    return Tokenizer.load(path)


def _tokenize(tokenizer: Tokenizer) -> Tokenize:
    """Return what tokenizes the text of a request's body."""

    def tokenize(body: dict[str, Any]) -> Any:
        if "messages" not in body:
            return tokenizer.encode(body["prompt"])
        turns = [{**turn, "content": _text_of(turn)} for turn in body["messages"]]
        rendered = tokenizer.rendered(turns, tools=body.get("tools") or ())
        return tokenizer.encode_rendered(rendered)[0]

    return tokenize


def _text_of(turn: dict[str, Any]) -> str:
    """Return the text of a message; raises `InvalidValue` if it has anything else."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidValue("only text can be tokenized here")
    return "\n".join(texts)


def _announce(url: str, names: list[str], sources: list[Source], discover: list[str]) -> None:
    known = {source.instance for source in sources}
    found = f", and to those found at {', '.join(discover)}" if discover else ""
    print(
        f"kvkeep routes at {url} to {len(names)} instance{'s' * (len(names) != 1)}, "
        f"{len(known)} with KV events{found}",
        flush=True,
    )
    for name in names:
        if name not in known:
            print(f"kvkeep: no --events for {name}: its cache is unknown", file=sys.stderr)
