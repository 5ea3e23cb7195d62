"""``kvkeep serve``: an OpenAI-compatible HTTP server on the paged cache."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import math
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import model_name
from kvkeep.cli.client import KEY_VARIABLE, api_key
from kvkeep.cli.model import choose_threads, load
from kvkeep.cli.serve_options import add_options, allowed_hosts, eviction_of, weights_of
from kvkeep.cli.tiers import cache_folder, default_tiers, open_default_store, open_store
from kvkeep.core.cost import CostModel
from kvkeep.core.errors import InvalidValue, require, whole
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.public import read_prefixes
from kvkeep.core.tokens import TOKEN_BYTES
from kvkeep.observe import telemetry

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvkeep.bench.traces import Capture
    from kvkeep.cli.arguments import Commands
    from kvkeep.core.cache import PagedCache
    from kvkeep.observe.telemetry.tracing import Tracing
    from kvkeep.serve.engine import Engine, Limits, Runner
    from kvkeep.serve.http import ConnectionLimits
    from kvkeep.serve.kv_events import EventPublisher
    from kvkeep.serve.server import Listener, ServerSettings
    from kvkeep.store import KVStore

__all__ = ["add_parser", "kept_costs", "run"]


def _model_on(runner: Runner) -> str:
    """Return the name of a model on a device, by which its costs are told from others."""
    from kvkeep.serve.engine.runner import device_name  # noqa: PLC0415 - loaded with the runner

    return f"{runner.identity} on {device_name(runner.device)}"


def kept_costs(
    path: Path | None, runner: Runner, tiers: Sequence[str]
) -> AbstractContextManager[CostModel]:
    """Return the costs, which are in a file, and written to it at the end.

    Without ``path`` it is in the user's cache, by model, device and tiers, if it can be there.
    Raises `InvalidValue` for a ``path`` with costs of another model, or with none.
    """
    model = _model_on(runner)
    if path is not None:
        return CostModel.saved(path, model)
    named = json.dumps([model, list(tiers)]).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(named, digest_size=16).hexdigest()
    try:
        folder = cache_folder().parent / "costs"
    except RuntimeError:  # there is no home
        return nullcontext(CostModel(model=model))
    return CostModel.saved(folder / f"{digest}.json", model, strict=False)


_SAMPLED_BLOCKS = 0.1  # share of the blocks that estimate the hit rate of other pool sizes
_STEP_TOKENS = 1024  # keeps the steps short that decoding answers wait for on a CPU
_GPU_STEP_TOKENS = 8192  # an H100 computes long prompts in half of the time
_ASKED = '"max_tokens": 32, "temperature": 0'
_QUESTION = '"messages": [{"role": "user", "content": "What does textwrap.dedent do?"}]'


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. Common prefixes of prompts "
        "are computed once. On SIGTERM the server ends when its running requests have ended.",
    )
    parser.add_config("serve")
    add_options(parser)
    parser.set_defaults(run=run, check=check)


def check(args: argparse.Namespace) -> None:
    """Raise `InvalidValue` for options that `run` refuses. Opens nothing but files of keys."""
    choose_threads(args)  # before torch is imported
    require("kvkeep.serve.server", "server")  # first: a missing extra is that of all below
    from kvkeep.serve.http import check_port  # noqa: PLC0415
    from kvkeep.store.tiers import check_tiers, tiering  # noqa: PLC0415

    check_port(args.port)
    _connections(args, 1)
    _limits(args, _STEP_TOKENS)
    key = None if args.api_key is None else api_key(args.api_key_file, args.api_key)
    _settings(args, key)
    eviction_of(args)
    whole("page_size", args.page_size, 1)
    if args.block_tokens is not None:
        whole("block_tokens", args.block_tokens, 1)
    tiering(args.tiering)
    if args.tier:
        check_tiers(args.tier)
    if not 0 <= args.load_timeout < math.inf:
        raise InvalidValue(f"load_timeout is 0 seconds or more, got {args.load_timeout}")
    for option, given in (("--no-store", args.no_store), ("--no-reuse", args.no_reuse)):
        if given and args.tier:
            raise InvalidValue(f"{option} uses no tiers: leave out either {option} or --tier")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0 after an orderly shutdown."""
    check(args)
    from kvkeep.serve.engine import Engine  # noqa: PLC0415 - seconds, for torch
    from kvkeep.serve.http import bind, connections_for, raise_file_limit, url_of  # noqa: PLC0415
    from kvkeep.serve.server import Listener, create_app  # noqa: PLC0415

    raise_file_limit()
    connections = _connections(args, connections_for())
    settings = _settings(args, api_key(args.api_key_file, args.api_key))
    telemetry.configure(args.log_level, args.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # Bind before loading the model, so that a port in use is reported at once.
    with bind(args.host, args.port) as bound:
        runner, tokenizer = load(args, dtype=args.dtype)
        cache = runner.cache(
            eviction=eviction_of(args),
            what_if=_SAMPLED_BLOCKS,
            reuse=not args.no_reuse,
        )
        file = args.public_prefixes
        public = [] if file is None else read_prefixes(file, tokenizer)
        cache.public.declare(*public)
        with (
            _publisher(args, cache) as publisher,
            kept_costs(args.cost, runner, _tiers(args)) as cost,
            _store(args, runner, settings.name, cost) or nullcontext() as store,
            _capture(args, cache, settings.name) as capture,
            _tracing() as tracing,
        ):
            if store is not None:
                store.public.declare(*public)
            engine = Engine(
                runner,
                cache,
                tokenizer,
                limits=_limits(
                    args, _GPU_STEP_TOKENS if runner.device.type == "cuda" else _STEP_TOKENS
                ),
                store=store,
                load_timeout=args.load_timeout,
                cost=cost,
            )
            announce = partial(_announce, engine, settings, url_of(bound), publisher)
            app = create_app(
                engine,
                settings,
                capture=capture,
                observers=[] if tracing is None else [tracing.see],
                events=None if publisher is None else publisher.stats.as_dict,
            )
            # Modules and model stay: to look through them in each full collection of garbage would
            # stop all answers for a quarter of a second.
            gc.freeze()
            return _listen(Listener(app, connections, ready=announce), bound)


@contextmanager
def _publisher(args: argparse.Namespace, cache: PagedCache) -> Iterator[EventPublisher | None]:
    if args.events is None:
        yield None
        return
    from kvkeep.serve.kv_events import EventPublisher  # noqa: PLC0415 - needs an extra

    publisher = EventPublisher(cache, args.events, _replay_of(args.events))
    try:
        yield publisher
    finally:
        publisher.close()


def _replay_of(endpoint: str) -> str:
    """Return the address that resends events: at the next port, or at another free one."""
    start, _, port = endpoint.rpartition(":")
    if port.isdecimal():
        return f"{start}:{int(port) + 1}" if int(port) else endpoint
    return endpoint if port == "*" else f"{endpoint}-replay"


@contextmanager
def _capture(args: argparse.Namespace, cache: PagedCache, name: str) -> Iterator[Capture | None]:
    if args.capture is None:
        yield None
        return
    from kvkeep.bench.traces import Capture  # noqa: PLC0415 - only needed with --capture

    capture = Capture(args.capture, name=name, page_size=cache.page_size, pages=cache.num_pages)
    try:
        yield capture
    finally:
        capture.close()
        done = capture.stats()
        dropped = f", {done.dropped:,} dropped" if done.dropped else ""
        print(f"captured {done.written:,} requests in {args.capture}{dropped}", flush=True)


@contextmanager
def _tracing() -> Iterator[Tracing | None]:
    """Export spans if the environment names a collector."""
    tracing = telemetry.start()
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def _store(args: argparse.Namespace, runner: Runner, name: str, cost: CostModel) -> KVStore | None:
    if not _tiers(args):
        return None
    if args.tier:
        return open_store(
            args, runner, name=name, tiers=args.tier, shares=weights_of(args), cost=cost
        )
    return open_default_store(args, runner, name=name, shares=weights_of(args), cost=cost)


def _tiers(args: argparse.Namespace) -> Sequence[str]:
    if args.no_store or args.no_reuse:
        return ()
    return args.tier or default_tiers()


def _listen(listener: Listener, bound: socket.socket) -> int:
    from kvkeep.serve.http import url_of  # noqa: PLC0415

    try:
        asyncio.run(listener.serve([bound]))
    except OSError as error:  # another process has taken the port since it was bound
        raise InvalidValue(f"cannot listen on {url_of(bound)}: {error.strerror}") from error
    return 0


def _connections(args: argparse.Namespace, most: int) -> ConnectionLimits:
    from kvkeep.serve.http import ConnectionLimits  # noqa: PLC0415

    return ConnectionLimits(most=most, stall_s=max(1.0, args.request_timeout))


def _limits(args: argparse.Namespace, step_tokens: int) -> Limits:
    from kvkeep.serve.engine import Limits  # noqa: PLC0415 - seconds, for torch

    return Limits(
        max_running=args.max_running,
        step_tokens=max(step_tokens, args.max_running),
        max_waiting=args.max_waiting,
    )


def _settings(args: argparse.Namespace, key: str | None) -> ServerSettings:
    from kvkeep.serve.server import LOOPBACK_HOSTS, ServerSettings  # noqa: PLC0415

    hosts = allowed_hosts(args.host, args.allow_host, LOOPBACK_HOSTS)
    return ServerSettings(
        name=model_name(args.model) if args.name is None else args.name,
        api_key=key,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        hosts=None if hosts is None else frozenset(hosts),
        text=not args.no_text,
        weights=weights_of(args) or {},
    )


def _announce(
    engine: Engine, settings: ServerSettings, url: str, publisher: EventPublisher | None
) -> None:
    """Print the address and a request to try."""
    runner = engine.runner
    size = format_bytes(runner.num_pages * runner.plan.page_bytes)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if settings.api_key else ""
    chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    path, question = (
        ("chat/completions", _QUESTION) if chat else ("completions", '"prompt": "Once"')
    )
    body = f"{{{_ASKED}, {question}}}"
    print(
        f"kvkeep serves {settings.name} at {url} "
        f"({runner.num_pages:,} pages of {runner.page_size} tokens, {size})\n"
        f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )
    public = engine.cache.public
    if len(public):
        lengths = [len(row) // TOKEN_BYTES for row in public.rows]
        short = sum(length < runner.page_size for length in lengths)
        less = f", {short} shorter than a page and not shared" if short else ""
        print(f"public prefixes: {len(public) - short} shared by all tenants{less}", flush=True)
    if not engine.cache.reuse:
        print("no KV is reused or kept: every prompt is computed in full (--no-reuse)", flush=True)
    if engine.store is not None:
        places = ", ".join(tier.place for tier in engine.store.stats().tiers)
        print(f"KV is stored in {places}", flush=True)
    if publisher is not None:
        replay = "" if publisher.replay is None else f", replay at {publisher.replay}"
        print(f"KV events at {publisher.endpoint}{replay}", flush=True)
    if settings.hosts is None and settings.api_key is None:
        print(
            "kvkeep: warning: everyone who can reach this address can use the server and read "
            f"cached prompts; set ${KEY_VARIABLE} to require a key",
            file=sys.stderr,
        )
