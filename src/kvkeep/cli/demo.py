"""``kvkeep demo``: one document, several questions, through the real server, cold and warm.

At the end the server is stopped and started again, and gets the first question once more.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvkeep.cli.arguments import add_count, add_json, model_name
from kvkeep.cli.client import Address, Client
from kvkeep.cli.completions import ask
from kvkeep.cli.demo_view import as_json, print_rows
from kvkeep.cli.model import add_model_arguments, choose_threads, load
from kvkeep.cli.progress import progress
from kvkeep.cli.tiers import add_store_arguments, open_store
from kvkeep.core.errors import require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.completions import CompletionReply
    from kvkeep.serve.engine import Engine

    Talk = list[dict[str, str]]

__all__ = ["add_parser", "run"]

# The document: docstrings of Python's standard library (PSF-2.0), on which the bundled model was
# trained.
SECTIONS = (
    "textwrap.dedent", "textwrap.shorten", "textwrap.wrap", "json.dumps", "heapq.merge",
    "heapq.nlargest", "shutil.copytree", "shutil.rmtree", "os.makedirs", "random.shuffle",
    "random.sample", "functools.partial", "statistics.median", "itertools.groupby",
)  # fmt: skip
SECTION_CHARACTERS = 700
ASKED = ("textwrap.dedent", "heapq.merge", "shutil.copytree", "random.shuffle")
FOLLOW_UP = "textwrap.shorten"
TENANTS = ("a", "b")
CLIENTS = ("json.dumps", "os.makedirs", "textwrap.wrap", "shutil.rmtree")
RESTARTED = "restarted"
REQUESTS = len(ASKED) + 1 + len(TENANTS) + len(CLIENTS) + 1
DIFFERENT = 1  # exit code


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One request, sent cold and warm; all fields but ``ttft_cold_s`` are of the warm one."""

    request: str
    about: str
    prompt_tokens: int
    reused_tokens: int
    loaded_tokens: int
    generated_tokens: int
    ttft_cold_s: float
    ttft_warm_s: float
    tokens_per_s: float | None
    same_text: bool
    text: str

    @property
    def faster(self) -> float:
        """Cold time to the first token, divided by the warm one."""
        return self.ttft_cold_s / self.ttft_warm_s


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "demo",
        help="start the server, ask about a long document, and compare cold with warm",
        description="Start the server, ask questions about one long document over HTTP, and stop "
        "it. Every request is sent twice: cold, with nothing to reuse, and warm. The exit code is "
        "1 if the two answers to a request differ. Then start the server again and repeat the "
        "first question, whose KV comes from the tiers. The document and the questions are from "
        "the training text of the model that kvkeep ships: another model may answer them badly, "
        "but must give the same answer twice.",
    )
    add_model_arguments(parser, memory="256MiB")
    add_store_arguments(parser, default="memory, and a folder that is deleted at the end")
    add_count(parser, "--max-tokens", 64, "tokens per answer")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the conversation and print it; return 1 if two answers to a request differ."""
    choose_threads(args)  # before torch is imported
    name = model_name(args.model)
    # The server ends before the pool of clients: clients that wait for it then end, too.
    with (
        ThreadPoolExecutor(len(CLIENTS), "kvkeep client") as clients,
        _tiers(args) as tiers,
    ):
        demo = Demo(clients, max_tokens=args.max_tokens)
        with _service(args, name, tiers) as (engine, url):
            if not args.json:
                print(f"{name} is served at {url} while this lasts", flush=True)
            with progress("asking, cold and warm", of=2 * (REQUESTS - 1)) as advance:
                rows = demo.play(url, engine, advance)
            stats = clients.submit(_stats, url).result()
        with (
            _service(args, name, tiers) as (engine, again),
            progress("asking again", of=2) as advance,
        ):
            rows += demo.ask_again(again, engine, advance)
    if args.json:
        print(json.dumps(as_json(url, name, rows, stats)))
    else:
        print_rows(rows, len(CLIENTS), args.model)
    return 0 if all(row.same_text for row in rows) else DIFFERENT


def _stats(url: str) -> dict[str, Any]:
    with Client(Address.parse(url)) as client:
        return client.get("/kv/stats")


@contextmanager
def _tiers(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the tiers of ``--tier``, or temporary ones."""
    if args.tier:
        yield args.tier
        return
    with tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as folder:
        yield ["memory://64MiB", f"file://{quote(folder)}?size=4GiB"]


@contextmanager
def _service(args: argparse.Namespace, name: str, tiers: list[str]) -> Iterator[tuple[Engine, str]]:
    """Serve a new engine over ``tiers``; yield the engine and its URL."""
    with progress("starting"):
        require("kvkeep.serve.server", "server")  # a missing extra is told before a model is loaded
        from kvkeep.serve.engine import Engine  # noqa: PLC0415 - seconds, for torch

    # float32: in half precision the order of summation can decide between two close logits.
    runner, tokenizer = load(args, dtype="float32")
    with open_store(args, runner, name=name, tiers=tiers) as store:
        cache = runner.cache()
        engine = Engine(runner, cache, tokenizer, store=store)
        with serving(engine, name) as url:
            yield engine, url


@contextmanager
def serving(engine: Engine, name: str) -> Iterator[str]:
    """Serve ``engine`` on a free local port, as ``kvkeep serve`` does; yield the URL.

    The server runs in a thread, so it ends with this process in any case. When the block ends,
    running requests fail.
    """
    from kvkeep.serve.server import Listener, ServerSettings, bind, create_app, url_of  # noqa: PLC0415

    settings = ServerSettings(name=name, drain_timeout_s=0)
    listening: Future[None] = Future()
    with bind("127.0.0.1", 0) as bound, ThreadPoolExecutor(1, "kvkeep server") as thread:
        url = url_of(bound)
        app = create_app(engine, settings)
        listener = Listener(app, ready=partial(listening.set_result, None))
        served = thread.submit(lambda: asyncio.run(listener.serve([bound])))
        try:
            wait((listening, served), return_when=FIRST_COMPLETED)
            yield url
        finally:
            # stop() has no effect before the server listens.
            wait((listening, served), return_when=FIRST_COMPLETED)
            if not served.done():
                listener.stop()
            served.result()


class Demo:
    """The conversation, played against a first server and then a second one.

    ``advance`` is called after each answer. ``clients`` are the threads that send requests.
    """

    def __init__(self, clients: ThreadPoolExecutor, *, max_tokens: int) -> None:
        self._url = ""
        self._chat = False
        self._advance: Callable[[], object] = lambda: None
        self._clients = clients
        self._max_tokens = max_tokens
        self._document = read_document()
        self._salts = 0

    def play(self, url: str, engine: Engine, advance: Callable[[], object]) -> list[DemoRow]:
        """Play the whole conversation with the server at ``url``."""
        self._warm_up(url, engine, advance)
        first, *others = ASKED
        rows = self._both("first", [first])
        for name in others:
            rows += self._both("again", [name])
        rows += self._both("follow-up", [FOLLOW_UP], before=rows[-1])
        for tenant in TENANTS:
            rows += self._both(f"tenant {tenant}", [first], salt=f"tenant {tenant}")
        return rows + self._both("at once", CLIENTS)

    def ask_again(self, url: str, engine: Engine, advance: Callable[[], object]) -> list[DemoRow]:
        """Send the first question again, to another server with an empty pool."""
        self._warm_up(url, engine, advance)
        return self._both(RESTARTED, ASKED[:1])

    def _warm_up(self, url: str, engine: Engine, advance: Callable[[], object]) -> None:
        self._url, self._advance = url, advance
        self._chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
        talk = [{"role": "user", "content": _question(ASKED[0])}]
        # torch warms up, unmeasured. All requests run in client threads: an interrupt, which is
        # raised in the main thread, then cannot leave a socket open.
        self._clients.submit(self._ask, talk, self._new_salt(), store=False).result()

    def _both(
        self,
        request: str,
        abouts: Sequence[str],
        *,
        before: DemoRow | None = None,
        salt: str | None = None,
    ) -> list[DemoRow]:
        """Ask about all ``abouts`` at once, cold and then warm, after the turn ``before``."""
        talks = [self._talk(about, before) for about in abouts]
        colds = self._at_once([(talk, self._new_salt(), False) for talk in talks])
        warms = self._at_once([(talk, salt, True) for talk in talks])
        return [
            _row(request, about, cold, warm)
            for about, cold, warm in zip(abouts, colds, warms, strict=True)
        ]

    def _at_once(self, requests: Sequence[tuple[Talk, str | None, bool]]) -> list[CompletionReply]:
        futures = [self._clients.submit(self._ask, *request) for request in requests]
        replies = []
        for future in futures:
            replies.append(future.result())
            self._advance()
        return replies

    def _ask(self, talk: Talk, salt: str | None, store: bool) -> CompletionReply:
        body: dict[str, Any] = {
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "kvkeep": {"store": store},
        }
        if salt is not None:
            body["cache_salt"] = salt
        if self._chat:
            return ask(self._url, "/v1/chat/completions", {**body, "messages": talk})
        prompt = "\n\n".join(turn["content"] for turn in talk) + "\n\n"
        return ask(self._url, "/v1/completions", {**body, "prompt": prompt})

    def _talk(self, about: str, before: DemoRow | None) -> Talk:
        system = f"Answer from this document.\n\n{self._document}"
        talk = [{"role": "system", "content": system}]
        if before is not None:
            talk += [
                {"role": "user", "content": _question(before.about)},
                {"role": "assistant", "content": before.text},
            ]
        return [*talk, {"role": "user", "content": _question(about)}]

    def _new_salt(self) -> str:
        """Return a cache_salt that no other request has: nothing is cached under it."""
        self._salts += 1
        return f"cold {self._salts}"


def read_document() -> str:
    """Return the document: the sections, each below its name, cut to whole paragraphs."""
    return "\n\n".join(f"# {name}\n\n{_section(name)}" for name in SECTIONS)


def _section(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    text = inspect.getdoc(getattr(import_module(module), attribute)) or ""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > SECTION_CHARACTERS:
            break
        kept += paragraph + "\n\n"
    return kept.strip()


def _question(about: str) -> str:
    return f"What does {about} do?"


def _row(request: str, about: str, cold: CompletionReply, warm: CompletionReply) -> DemoRow:
    assert not cold.cached_tokens, "the salt is new"
    return DemoRow(
        request=request,
        about=about,
        prompt_tokens=warm.prompt_tokens,
        reused_tokens=warm.cached_tokens,
        loaded_tokens=warm.loaded_tokens,
        generated_tokens=warm.generated_tokens,
        ttft_cold_s=cold.ttft_s,
        ttft_warm_s=warm.ttft_s,
        tokens_per_s=warm.tokens_per_s,
        same_text=cold.answer == warm.answer,
        text=warm.text,
    )
