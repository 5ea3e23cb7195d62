"""``kvkeep serve``: an OpenAI-compatible HTTP server on the paged cache."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli.model import add_model_arguments, choose_threads, load
from kvkeep.cli.numbers import amount, count
from kvkeep.cli.tiers import add_store_arguments, open_default_store, open_store
from kvkeep.cli.watch import KEY_VARIABLE, api_key
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES
from kvkeep.core.geometry.units import format_bytes
from kvkeep.observe import telemetry

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from kvkeep.bench.traces import Capture
    from kvkeep.cli.model import Commands
    from kvkeep.core.cache import PagedCache
    from kvkeep.observe.telemetry.tracing import Tracing
    from kvkeep.serve.engine import Engine, Runner
    from kvkeep.serve.kv_events import EventPublisher
    from kvkeep.serve.server import Listener, ServerSettings
    from kvkeep.store import KVStore

__all__ = ["add_parser", "run"]

_WATCHED = 0.1  # of the blocks of prompts
_BUNDLED_NAME = "kvkeep-tiny"
_BODY = '{"messages": [{"role": "user", "content": "What does textwrap.dedent do?"}]}'


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP. What prompts have in common is computed once. "
        "SIGTERM ends it when running requests are through.",
    )
    add_model_arguments(parser, memory="4GiB")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: as saved)")
    add_store_arguments(
        parser,
        default="1 GiB of memory, and $XDG_CACHE_HOME/kvkeep/store with at most 20 GiB and a tenth "
        "of what is free",
    )
    parser.add_argument(
        "--no-store", action="store_true", help="keep nothing but what is in the pool"
    )
    parser.add_argument(
        "--no-answers",
        action="store_true",
        help="write the KV of prompts alone to the tiers, not that of answers",
    )
    parser.add_argument(
        "--no-reuse",
        action="store_true",
        help="compute every prompt in full: reuse nothing, keep nothing",
    )
    parser.add_argument("--name", help="what clients call the model (default: its directory's)")
    address = parser.add_argument_group("address and access")
    address.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine")
    address.add_argument("--port", metavar="N", type=int, default=8000, help="0: a free one")
    address.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"asked of every request but /health (default: ${KEY_VARIABLE}, which others on "
        "this machine cannot read)",
    )
    address.add_argument(
        "--api-key-file", metavar="FILE", type=Path, help="the same, from the line in a file"
    )
    address.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a Host name to answer to, besides localhost (default beyond --host 127.0.0.1: any)",
    )
    _add_events(parser.add_argument_group("KV events, for a router: they show prompts' tokens"))
    _add_capture(parser.add_argument_group("capture, to replay what was asked for"))
    _add_limits(parser.add_argument_group("limits"))
    parser.add_argument(
        "--draft-tokens", metavar="N", type=count, default=0,
        help="guess so many tokens a step from what a prompt repeats (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--eviction",
        metavar="POLICY",
        choices=tuple(POLICIES),
        default="lru",
        help=f"what goes first: {', '.join(POLICIES)} (default: lru)",
    )
    parser.add_argument(
        "--what-if",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="watch a tenth of what is asked for, to tell in /kv/stats and /metrics what more or "
        "less memory would do (default: it does)",
    )
    parser.add_argument(
        "--no-text",
        action="store_true",
        help="show no text and no tokens of prompts in any answer of /kv",
    )
    parser.add_argument(
        "--no-explain",
        action="store_true",
        help="remember no prompts to explain what was reused of them (default: the last 1,000)",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: one object a line, for machines (default: text)",
    )
    parser.add_argument(
        "--otel",
        action="store_true",
        help="send OpenTelemetry spans of requests to a collector (default: if the environment "
        "names one)",
    )
    parser.set_defaults(run=run)


def _add_events(events: argparse._ArgumentGroup) -> None:
    events.add_argument(
        "--events", metavar="ADDRESS", help="publish them here, as tcp://127.0.0.1:5557"
    )
    events.add_argument(
        "--events-replay", metavar="ADDRESS", help="what was missed can be asked for here"
    )
    events.add_argument("--events-topic", metavar="TEXT", default="kv", help="default: kv")


def _add_capture(capture: argparse._ArgumentGroup) -> None:
    capture.add_argument(
        "--capture",
        metavar="FILE",
        type=Path,
        help="write a line for each request there: times, lengths, keyed hashes, never what was "
        "said; compressed where it ends in .gz",
    )
    capture.add_argument(
        "--capture-unit",
        metavar="TOKENS",
        type=count,
        help="that one hash stands for (default: the page size)",
    )


def _add_limits(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument(
        "--max-running", metavar="N", type=count, default=32, help="answers at once (default: 32)"
    )
    limits.add_argument(
        "--step-tokens", metavar="N", type=count, default=1024, help="tokens a step (default: 1024)"
    )
    limits.add_argument(
        "--max-waiting", metavar="N", type=count, default=256, help="then 429 (default: 256)"
    )
    limits.add_argument("--max-prompt-tokens", metavar="N", type=count, help="default: what fits")
    limits.add_argument(
        "--max-connections",
        metavar="N",
        type=count,
        help="open at once (default: 1,024, or what the limit on open files leaves)",
    )
    limits.add_argument(
        "--head-timeout",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds in which the head of a request has to come (default: 10)",
    )
    limits.add_argument(
        "--body-timeout",
        metavar="S",
        type=float,
        default=60.0,
        help="seconds in which its body has to come (default: 60)",
    )
    limits.add_argument(
        "--body-budget",
        metavar="SIZE",
        type=amount,
        default="256MiB",
        help="for the bodies of all requests together (default: 256MiB)",
    )
    limits.add_argument(
        "--request-timeout", metavar="S", type=float, default=600.0, help="seconds (default: 600)"
    )
    limits.add_argument(
        "--drain-timeout",
        metavar="S",
        type=float,
        default=30.0,
        help="seconds that running requests have once it is to end (default: 30)",
    )
    limits.add_argument(
        "--flush-timeout",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds that what they computed then has to reach the tiers (default: 10)",
    )
    limits.add_argument(
        "--load-timeout",
        metavar="S",
        type=float,
        default=2.0,
        help="seconds that a request waits for the tiers at most (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after an orderly end."""
    choose_threads(args)  # before torch comes
    from kvkeep.core.cache import PagedCache  # noqa: PLC0415
    from kvkeep.serve.engine import Engine, Limits  # noqa: PLC0415 - seconds, for torch
    from kvkeep.serve.http import ConnectionLimits, bind, connections_for, raise_file_limit, url_of  # noqa: PLC0415
    from kvkeep.serve.server import Listener, create_app  # noqa: PLC0415

    raise_file_limit()
    connections = ConnectionLimits(
        most=connections_for(args.max_connections),
        head_s=args.head_timeout,
        stall_s=max(1.0, args.request_timeout),
    )
    settings = _settings(args)
    if args.events_replay is not None and args.events is None:
        raise InvalidValue("--events-replay has nothing to replay without --events")
    for said, given in (("--no-store", args.no_store), ("--no-reuse", args.no_reuse)):
        if given and args.tier:
            raise InvalidValue(f"{said} and --tier exclude each other: {said} uses no tiers")
    telemetry.configure(args.log_level, args.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    limits = Limits(
        max_running=args.max_running, step_tokens=args.step_tokens, max_waiting=args.max_waiting
    )
    # Before the model is loaded: who has to choose another port should not wait for it.
    with bind(args.host, args.port) as bound:
        runner, tokenizer = load(args, dtype=args.dtype)
        what_if = _WATCHED if args.what_if else None
        cache = PagedCache(
            runner.num_pages,
            runner.page_size,
            eviction=args.eviction,
            what_if=what_if,
            reuse=not args.no_reuse,
        )
        with (
            _publisher(args, cache) as publisher,
            _store(args, runner, settings.name) or nullcontext() as store,
            _capture(args, cache, settings.name) as capture,
            _tracing(args) as tracing,
        ):
            engine = Engine(
                runner,
                cache,
                tokenizer,
                limits=limits,
                store=store,
                load_timeout=args.load_timeout,
            )
            announce = partial(_announce, engine, settings, url_of(bound), publisher)
            app = create_app(
                engine,
                settings,
                capture=capture,
                observers=[] if tracing is None else [tracing.see],
                events=None if publisher is None else publisher.stats.as_dict,
            )
            return _listen(Listener(app, connections, ready=announce), bound)


@contextmanager
def _publisher(args: argparse.Namespace, cache: PagedCache) -> Iterator[EventPublisher | None]:
    if args.events is None:
        yield None
        return
    from kvkeep.serve.kv_events import EventPublisher  # noqa: PLC0415 - an extra of its own

    publisher = EventPublisher(cache, args.events, args.events_replay, topic=args.events_topic)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def _capture(args: argparse.Namespace, cache: PagedCache, name: str) -> Iterator[Capture | None]:
    if args.capture is None:
        if args.capture_unit is not None:
            raise InvalidValue("--capture-unit says how --capture writes; name a file with it")
        yield None
        return
    from kvkeep.bench.traces import Capture  # noqa: PLC0415 - only where it is asked for

    capture = Capture(
        args.capture,
        name=name,
        page_size=cache.page_size,
        pages=cache.num_pages,
        unit_tokens=args.capture_unit,
    )
    try:
        yield capture
    finally:
        capture.close()
        done = capture.stats()
        left_out = f", {done.dropped:,} left out" if done.dropped else ""
        print(f"captured {done.written:,} requests in {args.capture}{left_out}", flush=True)


@contextmanager
def _tracing(args: argparse.Namespace) -> Iterator[Tracing | None]:
    """Spans, where they are asked for, or the environment names a collector for them."""
    tracing = telemetry.start(always=args.otel)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def _store(args: argparse.Namespace, runner: Runner, name: str) -> KVStore | None:
    if args.no_store or args.no_reuse:
        return None
    if args.tier:
        return open_store(args, runner, name=name, tiers=args.tier)
    return open_default_store(args, runner, name=name)


def _listen(listener: Listener, bound: socket.socket) -> int:
    from kvkeep.serve.http import url_of  # noqa: PLC0415

    try:
        asyncio.run(listener.serve([bound]))
    except OSError as error:  # somebody else was quicker to listen
        raise InvalidValue(f"cannot listen on {url_of(bound)}: {error.strerror}") from error
    return 0


def _key(args: argparse.Namespace) -> str | None:
    if args.api_key is None:
        return api_key(args.api_key_file)
    if args.api_key_file is not None:
        raise InvalidValue("--api-key and --api-key-file name the same; leave one out")
    return str(args.api_key) or None


def _settings(args: argparse.Namespace) -> ServerSettings:
    from kvkeep.serve.server import LOOPBACK_HOSTS, ServerSettings  # noqa: PLC0415

    allowed = frozenset(name.lower() for name in args.allow_host)
    if _is_loopback(args.host):
        hosts: frozenset[str] | None = allowed | LOOPBACK_HOSTS | {args.host.lower()}
    else:
        hosts = allowed or None
    name = args.name
    if name is None:
        name = _BUNDLED_NAME if args.model is None else args.model.resolve().name
    return ServerSettings(
        name=name,
        api_key=_key(args),
        max_prompt_tokens=args.max_prompt_tokens,
        body_budget_bytes=args.body_budget,
        body_timeout_s=args.body_timeout,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        flush_timeout_s=args.flush_timeout,
        draft_tokens=args.draft_tokens,
        hosts=hosts,
        text=not args.no_text,
        explain=not args.no_explain,
        answers=not args.no_answers,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(
    engine: Engine, settings: ServerSettings, url: str, publisher: EventPublisher | None
) -> None:
    """Say that it listens, and what to type next."""
    runner = engine.runner
    size = format_bytes(runner.num_pages * runner.page_size * runner.geometry.bytes_per_token)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if settings.api_key else ""
    chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    path, body = ("chat/completions", _BODY) if chat else ("completions", '{"prompt": "Once"}')
    print(
        f"kvkeep serves {settings.name} at {url} "
        f"({runner.num_pages:,} pages of {runner.page_size} tokens, {size})\n"
        f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )
    if not engine.cache.reuse:
        print("nothing is reused or kept: every prompt is computed (--no-reuse)", flush=True)
    if engine.store is not None:
        places = ", ".join(tier.place for tier in engine.store.stats().tiers)
        print(f"KV is kept in {places}", flush=True)
    if publisher is not None:
        replay = "" if publisher.replay is None else f", replayed at {publisher.replay}"
        print(f"KV events at {publisher.endpoint}{replay}", flush=True)
    if settings.hosts is None and settings.api_key is None:
        print(
            "kvkeep: whoever can reach this address can use it, and read what is cached: "
            f"set ${KEY_VARIABLE}",
            file=sys.stderr,
        )
