"""``kvkeep route``: a reverse proxy that sends each prompt where most of it is cached."""

from __future__ import annotations

import ipaddress
import logging
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.cli.numbers import amount, count
from kvkeep.core.errors import InvalidValue, require, whole

if TYPE_CHECKING:
    import argparse

    from kvkeep.cli.model import Commands
    from kvkeep.serve.kv_events import Source
    from kvkeep.serve.router import CostModel
    from kvkeep.serve.router.health import Timeouts
    from kvkeep.serve.router.prompts import Tokenize

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "route",
        help="route prompts to the instance that has most of them cached",
        description="A reverse proxy in front of several OpenAI-compatible servers (kvkeep serve, "
        "vLLM) of one model. It reads their KV events, and sends each prompt where it is through "
        "first: where most of it is cached, if not too much waits there.",
    )
    parser.add_argument(
        "--instances", metavar="URL,…", required=True, help="http://HOST:PORT of each"
    )
    events = parser.add_argument_group("their KV events, in the order of the instances")
    events.add_argument(
        "--events", metavar="ADDRESS,…", default="", help="tcp://HOST:PORT of each ('': has none)"
    )
    events.add_argument(
        "--replay", metavar="ADDRESS,…", default="", help="where each replays what was missed"
    )
    events.add_argument("--topic", default="", help="only events of topics that begin so")
    events.add_argument(
        "--ranks", metavar="N", type=count, default=1,
        help="data-parallel ranks of each instance, on ports one above the other (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        help="tokenize here, with this model directory's tokenizer (default: ask an instance)",
    )
    costs = parser.add_argument_group("what a prompt costs")
    costs.add_argument(
        "--prefill-speed", metavar="N", type=float, help="tokens a second (default: 15,000)"
    )
    costs.add_argument(
        "--balance", metavar="X", type=float,
        help="how much of what an instance had of late counts against it (default: 0.02)",
    )  # fmt: skip
    waits = parser.add_argument_group("instances that do not answer, in seconds")
    waits.add_argument(
        "--first-byte-timeout", metavar="S", type=float, default=600.0,
        help="until an answer begins, prefill and queue included (default: 600)",
    )  # fmt: skip
    waits.add_argument(
        "--idle-timeout", metavar="S", type=float, default=300.0,
        help="between two pieces of an answer (default: 300)",
    )  # fmt: skip
    waits.add_argument(
        "--probe-interval", metavar="S", type=float, default=1.0,
        help="from one GET /health of an instance to the next (default: 1)",
    )  # fmt: skip
    waits.add_argument(
        "--probe-timeout", metavar="S", type=float, default=2.0,
        help="until a probe is answered; then the instance gets no requests (default: 2)",
    )  # fmt: skip
    waits.add_argument(
        "--tokenize-timeout", metavar="S", type=float, default=2.0,
        help="until an instance's /tokenize answers (default: 2)",
    )  # fmt: skip
    waits.add_argument(
        "--tries", metavar="N", type=count, default=2,
        help="instances that may have a request without answering it (default: 2)",
    )  # fmt: skip
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-connections", metavar="N", type=count,
        help="open at once (default: 1,024, or half of what the limit on open files leaves)",
    )  # fmt: skip
    limits.add_argument(
        "--head-timeout", metavar="S", type=float, default=10.0,
        help="seconds in which the head of a request has to come (default: 10)",
    )  # fmt: skip
    limits.add_argument(
        "--body-timeout", metavar="S", type=float, default=60.0,
        help="seconds in which its body has to come (default: 60)",
    )  # fmt: skip
    limits.add_argument(
        "--body-budget", metavar="SIZE", type=amount, default="256MiB",
        help="for the bodies of all requests together (default: 256MiB)",
    )  # fmt: skip
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--most-blocks", metavar="N", type=count, default=1_000_000,
        help="blocks that are remembered of an instance; beyond, those that were stored or looked "
        "up longest ago are forgotten (default: 1,000,000, some 250 MB)",
    )  # fmt: skip
    address = parser.add_argument_group("address")
    address.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine")
    address.add_argument("--port", metavar="N", type=int, default=8080, help="0: a free one")
    address.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[],
        help="a Host name to answer to, besides localhost (default beyond --host 127.0.0.1: any)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Route until a signal; 0 after an orderly end."""
    require("zmq", "router")
    require("httpx", "router")
    require("starlette", "router")
    require("uvicorn", "router")
    require("prometheus_client", "router")
    from kvkeep.serve import http  # noqa: PLC0415
    from kvkeep.serve.kv_events import EventReader  # noqa: PLC0415
    from kvkeep.serve.router import PrefixRouter  # noqa: PLC0415
    from kvkeep.serve.router.listening import serve  # noqa: PLC0415
    from kvkeep.serve.router.proxy import create_proxy  # noqa: PLC0415
    from kvkeep.serve.router.upstreams import Upstreams  # noqa: PLC0415

    timeouts = _timeouts(args)
    http.raise_file_limit()
    limits = http.ConnectionLimits(
        most=http.connections_for(args.max_connections, files_each=2), head_s=args.head_timeout
    )
    names = _listed(args.instances)
    sources = _sources(args, names)
    upstreams = Upstreams(names)
    router = PrefixRouter(names, cost=_cost(args), ranks=args.ranks, most_blocks=args.most_blocks)
    bodies = http.BodyBudget(budget=args.body_budget, seconds=args.body_timeout)
    tokenize = None if args.model is None else _tokenizer(args.model)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    for noisy in ("uvicorn", "httpx", "httpcore"):  # httpx writes a line for each request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with http.bind(args.host, args.port) as bound:
        reader = EventReader(sources, router) if sources else None
        try:
            proxy = create_proxy(
                router,
                upstreams,
                reader,
                tokenize=tokenize,
                hosts=_hosts(args.host, args.allow_host),
                timeouts=timeouts,
                bodies=bodies,
            )
            serve(proxy, bound, limits=limits, ready=lambda url: _announce(url, names, sources))
        finally:
            if reader is not None:
                reader.close()
    return 0


def _listed(text: str) -> list[str]:
    return [one.strip().rstrip("/") for one in text.split(",")]


def _sources(args: argparse.Namespace, names: list[str]) -> list[Source]:
    from kvkeep.serve.kv_events import Source  # noqa: PLC0415
    from kvkeep.serve.router.router import MOST_RANKS  # noqa: PLC0415

    whole("--ranks", args.ranks, 1, MOST_RANKS)
    events = _listed(args.events) if args.events else [""] * len(names)
    replays = _listed(args.replay) if args.replay else [""] * len(names)
    for given, option in ((events, "--events"), (replays, "--replay")):
        if len(given) != len(names):
            raise InvalidValue(
                f"{option} names one address for each of the {len(names)} instances, got "
                f"{len(given)}; leave one empty for an instance without"
            )
    return [
        Source(name, _of_rank(event, rank), _of_rank(replay, rank) or None, args.topic)
        for name, event, replay in zip(names, events, replays, strict=True)
        if event
        for rank in range(args.ranks)
    ]


def _of_rank(address: str, rank: int) -> str:
    """As vLLM has it: each rank's port is one above that of the rank before."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank and port.isdecimal() else address


def _cost(args: argparse.Namespace) -> CostModel:
    from kvkeep.serve.router import CostModel  # noqa: PLC0415

    given: dict[str, Any] = {}
    if args.prefill_speed is not None:
        if not args.prefill_speed > 0:
            raise InvalidValue(f"--prefill-speed is above 0, got {args.prefill_speed}")
        given["token_s"] = 1 / args.prefill_speed
    if args.balance is not None:
        given["balance"] = args.balance
    return CostModel(**given)


def _timeouts(args: argparse.Namespace) -> Timeouts:
    from kvkeep.serve.router.health import Timeouts  # noqa: PLC0415

    for option in ("first_byte_timeout", "idle_timeout", "probe_interval", "probe_timeout",
                   "tokenize_timeout", "head_timeout", "body_timeout"):  # fmt: skip
        seconds = getattr(args, option)
        if not 0 < seconds < math.inf:
            name = option.replace("_", "-")
            raise InvalidValue(f"--{name} is a number of seconds above 0, got {seconds}")
    return Timeouts(
        first_byte_s=args.first_byte_timeout,
        idle_s=args.idle_timeout,
        probe_every_s=args.probe_interval,
        probe_s=args.probe_timeout,
        tokenize_s=args.tokenize_timeout,
        tries=whole("--tries", args.tries, 1),
    )


def _tokenizer(path: Path) -> Tokenize:
    from kvkeep.serve.engine import Tokenizer  # noqa: PLC0415 - seconds, for torch

    tokenizer = Tokenizer.load(path)

    def tokenize(asked: dict[str, Any]) -> Any:
        if "messages" not in asked:
            return tokenizer.encode(asked["prompt"])
        for turn in asked["messages"]:
            if not (
                isinstance(turn, dict) and all(isinstance(said, str) for said in turn.values())
            ):
                raise InvalidValue("only text can be tokenized here")
        return tokenizer.chat(asked["messages"])

    return tokenize


def _hosts(host: str, allowed: list[str]) -> list[str] | None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    names = [name.lower() for name in allowed]
    return [*names, "localhost", "127.0.0.1", "[::1]", host] if loopback else names or None


def _announce(url: str, names: list[str], sources: list[Source]) -> None:
    told = len({source.instance for source in sources})
    print(f"kvkeep routes at {url} to {len(names)} instances, {told} with KV events", flush=True)
    for name in names:
        if not any(source.instance == name for source in sources):
            print(f"kvkeep: no --events for {name}: its cache is unknown", file=sys.stderr)
