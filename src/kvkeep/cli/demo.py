"""``kvkeep demo``: one document, several questions, through the real server, cold and warm.

At the end the server is stopped and started again, and gets the first question once more.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import shlex
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvkeep.cli.arguments import add_count, add_json, model_name
from kvkeep.cli.client import Address, Client
from kvkeep.cli.model import add_model_arguments, choose_threads, load
from kvkeep.cli.tables import progress
from kvkeep.cli.tiers import add_store_arguments, open_store
from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.cli.arguments import Commands
    from kvkeep.serve.engine import Engine

    Talk = list[dict[str, str]]
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["CompletionReply", "add_parser", "as_json", "ask", "print_rows", "run"]

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


_TIMEOUT_S = 600.0  # the server's own default for a request
_OUT_OF_MEMORY = {"context_length_exceeded", "out_of_pages"}


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """A completion, timed at the client: seconds count from before the connection is made."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    generated_tokens: int
    ttft_s: float
    seconds: float

    @property
    def answer(self) -> tuple[str, int, str]:
        """The part of the reply that must not depend on the cache."""
        return self.text, self.generated_tokens, self.finish_reason

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first one; None for an answer of one token."""
        streamed = self.seconds - self.ttft_s
        return (self.generated_tokens - 1) / streamed if self.generated_tokens > 1 else None


def ask(url: str, path: str, body: dict[str, Any]) -> CompletionReply:
    """Post ``body`` to the completion endpoint at ``path``, and read the stream to its end.

    Raises `InvalidValue` with the server's message for a request that it refuses, and
    `ConnectionError` for a stream that breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun = time.perf_counter()
    text, finish_reason, usage = "", "", None
    ttft = None
    with closing(Address.parse(url).connection(_TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        # The response is closed separately: it owns the socket of a connection not kept alive.
        with connection.getresponse() as response:
            if response.status != 200:
                raise _refusal(json.load(response)["error"])
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    more = _text(choice)
                    text += more
                    finish_reason = choice["finish_reason"] or finish_reason
                    if ttft is None and (more or finish_reason):
                        ttft = time.perf_counter() - begun
    seconds = time.perf_counter() - begun
    if ttft is None or usage is None:
        raise ConnectionError("the stream ended without a token or without its usage")
    return CompletionReply(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        loaded_tokens=usage.get("kvkeep", {}).get("loaded_tokens", 0),
        generated_tokens=usage["completion_tokens"],
        ttft_s=ttft,
        seconds=seconds,
    )


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events until ``[DONE]``, which is required."""
    for line in lines:
        field, _, data = line.partition(b":")
        if field != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _refusal(event["error"])
        yield event
    raise ConnectionError("the stream broke off")


def _text(choice: dict[str, Any]) -> str:
    """Return the text of an event, of a chat completion or a plain one."""
    more: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return more


def _refusal(error: dict[str, Any]) -> Exception:
    """Return the exception for an error object of the server."""
    message: str = error["message"]
    if error["code"] in _OUT_OF_MEMORY:
        return InvalidValue(f"{message}; use a larger --memory")
    if error["type"] == "invalid_request_error":
        return InvalidValue(message)
    return ConnectionError(f"the server reports: {message}")


_NEXT = """\
Next: {serve}, and when it listens
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
-d '{{"max_tokens": 32, "temperature": 0, \
"messages": [{{"role": "user", "content": "What does heapq.merge do?"}}]}}'"""


def _totals(rows: list[DemoRow]) -> dict[str, float | None]:
    prompt = sum(row.prompt_tokens for row in rows)
    reused = sum(row.reused_tokens for row in rows)
    faster = [row.faster for row in rows if row.reused_tokens]
    return {
        "prompt_tokens": prompt,
        "reused_tokens": reused,
        "reused_share": reused / prompt,
        # None if nothing was reused.
        "ttft_median_ratio": median(faster) if faster else None,
    }


def as_json(url: str, name: str, rows: list[DemoRow], stats: dict[str, Any]) -> dict[str, Any]:
    """Return the output of ``--json``; ``stats`` is the answer of /kv/stats."""
    return {
        "url": url,
        "model": name,
        "requests": [{**asdict(row), "faster": row.faster} for row in rows],
        "same_text": all(row.same_text for row in rows),
        **_totals(rows),
        **stats,
    }


def print_rows(rows: list[DemoRow], clients: int, model: Path | None) -> None:
    """Print a table of the requests, and a summary.

    ``model`` is the directory of the model; None is the bundled model.
    """
    console = require("rich.console", "cli").Console()
    say = partial(console.print, markup=False, highlight=False)
    say(
        f"{len(rows)} requests over HTTP about one document: What does … do?\n"
        "cold      every token is computed, and nothing is kept\n"
        "warm      the KV of earlier requests is reused\n"
        "TTFT      time to first token, as the client measures it\n"
        "tenant …  has its own cache_salt and shares with no other\n"
        f"at once   {clients} clients at the same time, cold as well as warm\n"
        "restarted the server was stopped and started again: its pool is empty"
    )
    console.print(_table(rows))
    say(f"> What does {rows[0].about} do?\n{rows[0].text.strip()}\n")
    totals = _totals(rows)
    line = f"{totals['prompt_tokens']:,} prompt tokens, {totals['reused_share']:.0%} reused"
    if totals["ttft_median_ratio"] is not None:
        line += f"; with reuse, answers began {totals['ttft_median_ratio']:.1f}× sooner (median)"
    say(line)
    last = rows[-1]
    say(
        f"After the restart {last.loaded_tokens:,} of {last.prompt_tokens:,} prompt tokens came "
        f"from disk:\nthe first token after {_milliseconds(last.ttft_warm_s)} instead of "
        f"{_milliseconds(last.ttft_cold_s)}"
    )
    if not all(row.same_text for row in rows):
        print("kvkeep: a warm answer differs from its cold one", file=sys.stderr)
    serve = "kvkeep serve (or make serve)"
    if model is not None:
        serve = f"kvkeep serve --model {shlex.quote(str(model))}"
    print(_NEXT.format(serve=serve))  # not wrapped: users copy it


def _table(rows: list[DemoRow]) -> Any:
    box = require("rich.box", "cli").SIMPLE_HEAD
    table = require("rich.table", "cli").Table(box=box, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nrequest", no_wrap=True)
    table.add_column("\nasks about", no_wrap=True)
    for heading in (
        "prompt\ntokens", "reused\ntokens", "TTFT\ncold", "TTFT\nwarm", "tokens\n/s", "same\ntext",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.request,
            row.about,
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            _milliseconds(row.ttft_cold_s),
            _milliseconds(row.ttft_warm_s),
            "–" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            "yes" if row.same_text else "NO",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"
