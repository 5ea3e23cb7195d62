"""Every option of ``kvkeep route`` and ``kvkeep serve`` arrives at what it is for.

The commands run; what they make is replaced, and its arguments are noted.
"""

from __future__ import annotations

import argparse
import inspect
import socket
from contextlib import nullcontext
from operator import attrgetter
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import kvkeep.core.cache
from kvkeep.cli import _parser, main
from kvkeep.core.cost import PrefillCost
from kvkeep.serve.kv_events import Source
from kvkeep.serve.router.discovery import DnsName
from kvkeep.serve.server import LOOPBACK_HOSTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.model

A, B = "http://a:1", "http://b:2"
EVENTS = "--events tcp://a:5,tcp://b:6"
HOSTS = "--allow-host a.test --allow-host B.test"


class Option(NamedTuple):
    """An option in use: the words, where its value arrives (several: a tuple), and the value.

    ``{tmp}`` in the words is a folder of the test's own.
    """

    words: str
    arrives: str
    value: object


ROUTE = {
    "--config": Option("--config {tmp}/kvkeep.toml", "serve.drain_s", 11.0),
    "--instances": Option(
        f"--instances {A}/", "PrefixRouter.instances Upstreams.instances", ([A], [A])
    ),
    "--discover": Option(
        "--discover dns://a:5 --discover dns://b:6",
        "Membership.discovery.names",
        [DnsName("dns://a:5"), DnsName("dns://b:6")],
    ),
    "--events": Option(
        EVENTS, "EventReader.sources", [Source(A, "tcp://a:5"), Source(B, "tcp://b:6")]
    ),
    "--replay": Option(
        f"{EVENTS} --replay tcp://a:7,",
        "EventReader.sources",
        [Source(A, "tcp://a:5", "tcp://a:7"), Source(B, "tcp://b:6")],
    ),
    "--ranks": Option(
        "--events tcp://a:5, --ranks 2",
        "PrefixRouter.ranks EventReader.sources",
        (2, [Source(A, "tcp://a:5"), Source(A, "tcp://a:6")]),
    ),
    "--model": Option(
        "--model {tmp}/mine",
        "load_tokenizer.path.name create_proxy.tokenize.__name__",
        ("mine", "tokenize"),
    ),
    "--public-prefixes": Option(
        "--public-prefixes {tmp}/public", "PrefixRouter.public.rows", (b"\x07\0\0\0",)
    ),
    "--prefill-speed": Option(
        "--prefill-speed 500", "PrefixRouter.cost.prefill.seconds_per_token", 0.002
    ),
    "--first-byte-timeout": Option(
        "--first-byte-timeout 7", "create_proxy.timeouts.first_byte_s", 7.0
    ),
    "--idle-timeout": Option("--idle-timeout 7", "create_proxy.timeouts.idle_s", 7.0),
    "--drain-timeout": Option("--drain-timeout 7", "serve.drain_s", 7.0),
    "--host": Option(
        "--host 0.0.0.0",
        "bind.host create_proxy.hosts",
        ("0.0.0.0", None),
    ),
    "--port": Option("--port 7", "bind.port", 7),
    "--allow-host": Option(
        HOSTS,
        "create_proxy.hosts",
        ["a.test", "b.test", "localhost", "127.0.0.1", "[::1]", "127.0.0.1"],
    ),
    "--log-level": Option("--log-level error", "basicConfig.level", "ERROR"),
}

SERVE = {
    "--config": Option("--config {tmp}/kvkeep.toml", "Engine.limits.max_running", 11),
    "--model": Option(
        "--model {tmp}/mine",
        "load.path.name load_tokenizer.path.name create_app.settings.name",
        ("mine", "mine", "mine"),
    ),
    "--memory": Option("--memory 7MiB", "load.memory", 7 << 20),
    "--page-size": Option("--page-size 32", "load.page_size", 32),
    "--device": Option("--device cpu", "load.device", "cpu"),
    "--dtype": Option("--dtype bfloat16", "load.dtype", "bfloat16"),
    "--tier": Option(
        "--tier memory://1MiB --tier file:///x", "KVStore.tiers", ["memory://1MiB", "file:///x"]
    ),
    "--tiering": Option(
        "--tiering exclusive:3",
        "KVStore.policy.admit_after KVStore.policy.__class__.__name__",
        (3, "Exclusive"),
    ),
    "--block-tokens": Option("--block-tokens 512", "KVStore.block_tokens", 512),
    "--cost": Option("--cost {tmp}/cost.json", "Engine.cost.prefill.known", True),
    "--no-store": Option("--no-store", "Engine.store", None),
    "--no-reuse": Option("--no-reuse", "PagedCache.reuse Engine.store", (False, None)),
    "--name": Option("--name mine", "create_app.settings.name", "mine"),
    "--host": Option("--host 0.0.0.0", "bind.host create_app.settings.hosts", ("0.0.0.0", None)),
    "--port": Option("--port 7", "bind.port", 7),
    "--api-key": Option("--api-key secret", "create_app.settings.api_key", "secret"),
    "--api-key-file": Option("--api-key-file {tmp}/key", "create_app.settings.api_key", "filed"),
    "--allow-host": Option(
        HOSTS, "create_app.settings.hosts", LOOPBACK_HOSTS | {"a.test", "b.test", "127.0.0.1"}
    ),
    "--events": Option(
        "--events tcp://a:5",
        "EventPublisher.endpoint EventPublisher.replay create_app.events",
        ("tcp://a:5", "tcp://a:6", "stats"),
    ),
    "--capture": Option(
        "--capture {tmp}/mine", "Capture.path.name create_app.capture.made", ("mine", "Capture")
    ),
    "--max-running": Option("--max-running 7", "Engine.limits.max_running", 7),
    "--max-waiting": Option("--max-waiting 7", "Engine.limits.max_waiting", 7),
    "--request-timeout": Option(
        "--request-timeout 7",
        "create_app.settings.request_timeout_s Listener.limits.stall_s",
        (7.0, 7.0),
    ),
    "--drain-timeout": Option("--drain-timeout 7", "create_app.settings.drain_timeout_s", 7.0),
    "--load-timeout": Option("--load-timeout 7", "Engine.load_timeout", 7.0),
    "--eviction": Option("--eviction returns", "PagedCache.eviction", "returns"),
    "--share": Option(
        "--share a=3 --share b=0.5", "PagedCache.eviction.weights", {"a": 3, "b": 0.5}
    ),
    "--public-prefixes": Option(
        "--public-prefixes {tmp}/public", "pool.rows store.rows", ([[7]],) * 2
    ),
    "--no-text": Option("--no-text", "create_app.settings.text", False),
    "--log-level": Option("--log-level error", "configure.level", "error"),
    "--log-format": Option("--log-format json", "configure.form", "json"),
}


class Made(SimpleNamespace):
    """The arguments of what a command made, by its name."""

    def replace(self, patch: pytest.MonkeyPatch, where: str, result: object, *more: str) -> None:
        """Note the arguments of what is at ``where``, and give ``result``."""
        signature = inspect.signature(resolve_name(where))
        (name,) = more or (where.rpartition(".")[2],)

        def make(*args: Any, **named: Any) -> object:
            given = signature.bind(*args, **named)
            given.apply_defaults()
            arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
            setattr(self, name, SimpleNamespace(**arguments))
            return result

        patch.setattr(where, make)

    def find(self, names: str) -> object:
        """What was noted there; `NOT_MADE` where there is nothing."""
        try:
            return attrgetter(*names.split())(self)
        except AttributeError:
            return NOT_MADE


NOT_MADE = object()


@pytest.fixture
def made(monkeypatch, tmp_path) -> Iterator[Made]:
    """What both commands make."""
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)
    (tmp_path / "key").write_text("filed\n")
    (tmp_path / "public").write_text("[7]\n")
    (tmp_path / "kvkeep.toml").write_text(
        "[serve]\nmax-running = 11\n[route]\ndrain-timeout = 11\n"
    )
    PrefillCost(seconds_per_token=0.25).write(tmp_path / "cost.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = Made()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        one.replace(monkeypatch, "kvkeep.serve.http.bind", nullcontext(bound))
        one.replace(monkeypatch, "kvkeep.serve.engine.Tokenizer.load", object(), "load_tokenizer")
        one.replace(monkeypatch, "logging.basicConfig", None)
        yield one


@pytest.fixture
def route(made, monkeypatch) -> Callable[..., Made]:
    """``route(words)`` runs ``kvkeep route`` with them."""
    made.replace(
        monkeypatch, "kvkeep.serve.kv_events.EventReader", SimpleNamespace(close=lambda: None)
    )
    made.replace(monkeypatch, "kvkeep.serve.router.PrefixRouter", None)
    made.replace(monkeypatch, "kvkeep.serve.router.upstreams.Upstreams", None)
    made.replace(monkeypatch, "kvkeep.serve.router.membership.Membership", None)
    made.replace(monkeypatch, "kvkeep.serve.router.proxy.create_proxy", None)
    made.replace(monkeypatch, "kvkeep.serve.router.listening.serve", None)
    return lambda *words: ran(made, "route", "--instances", f"{A},{B}", *words)


@pytest.fixture
def serve(made, monkeypatch) -> Callable[..., Made]:
    """``serve(words)`` runs ``kvkeep serve`` with them."""

    async def listen(sockets: object) -> None:
        del sockets

    def cache(**options: object) -> object:
        return kvkeep.core.cache.PagedCache(8, 16, **options)

    def public(where: str) -> SimpleNamespace:
        def declare(*rows: object) -> None:
            setattr(made, where, SimpleNamespace(rows=list(rows)))

        return SimpleNamespace(declare=declare)

    runner = SimpleNamespace(
        num_pages=8, page_size=16, geometry=None, identity=None, layout=None, cache=cache,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = SimpleNamespace(**vars(runner), public=public("pool"))
    store = SimpleNamespace(public=public("store"))
    publisher = SimpleNamespace(stats=SimpleNamespace(as_dict="stats"), close=lambda: None)
    capture = SimpleNamespace(
        made="Capture", stats=lambda: SimpleNamespace(written=0, dropped=0), close=lambda: None
    )
    made.replace(monkeypatch, "kvkeep.serve.engine.Runner.load", runner)
    made.replace(monkeypatch, "kvkeep.core.cache.PagedCache", pool)
    made.replace(monkeypatch, "kvkeep.store.KVStore", nullcontext(store))
    made.replace(monkeypatch, "kvkeep.serve.engine.Engine", None)
    made.replace(monkeypatch, "kvkeep.serve.kv_events.EventPublisher", publisher)
    made.replace(monkeypatch, "kvkeep.bench.traces.Capture", capture)
    tracing = SimpleNamespace(see=lambda event: None, close=lambda: None)
    made.replace(monkeypatch, "kvkeep.observe.telemetry.start", tracing)
    made.replace(monkeypatch, "kvkeep.observe.telemetry.configure", None)
    made.replace(monkeypatch, "kvkeep.serve.server.create_app", None)
    made.replace(monkeypatch, "kvkeep.serve.server.Listener", SimpleNamespace(serve=listen))
    return lambda *words: ran(made, "serve", *words)


def ran(made: Made, *words: str) -> Made:
    vars(made).clear()
    assert main(words) == 0
    return made


@pytest.mark.parametrize("option", ROUTE)
def test_route_hands_on(option, route, tmp_path):
    words, arrives, value = ROUTE[option]
    assert route().find(arrives) != value, "the default shows nothing"
    assert route(*words.format(tmp=tmp_path).split()).find(arrives) == value


@pytest.mark.parametrize("option", SERVE)
def test_serve_hands_on(option, serve, tmp_path):
    words, arrives, value = SERVE[option]
    assert serve().find(arrives) != value, "the default shows nothing"
    assert serve(*words.format(tmp=tmp_path).split()).find(arrives) == value


@pytest.mark.parametrize(("command", "table"), [("route", ROUTE), ("serve", SERVE)])
def test_no_option_is_left_out_here(command, table):
    assert options(command) == table.keys()


def options(command: str) -> set[str]:
    """All options of a command; of a switch and its opposite the opposite."""
    (commands,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    return {one.option_strings[-1] for one in commands.choices[command]._actions} - {"--help"}
