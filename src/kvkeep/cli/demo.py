"""``kvkeep demo``: a conversation over one document through the real service, cold and warm.

At its end the service is stopped and started again, to be asked what it was asked before.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvkeep.cli.client import ask, get
from kvkeep.cli.model import add_model_arguments, choose_threads, load, progress
from kvkeep.cli.numbers import count
from kvkeep.cli.tiers import add_store_arguments, open_store
from kvkeep.core.errors import require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.cli.client import Heard
    from kvkeep.cli.model import Commands
    from kvkeep.serve.engine import Engine

    Talk = list[dict[str, str]]

__all__ = ["add_parser", "run"]

# The document: what the running Python says about these (PSF-2.0), which is also what the model
# that kvkeep ships has read.
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
DIFFERENT = 1
NEXT = """\
Next: kvkeep serve (or make serve), and when it listens
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
-d '{"messages": [{"role": "user", "content": "What does heapq.merge do?"}]}'"""


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One request, answered cold and warm; all but ``ttft_cold_s`` is about the warm one."""

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
        """How many times sooner the first token comes."""
        return self.ttft_cold_s / self.ttft_warm_s


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "demo",
        help="start the service, play a conversation over a long document, and compare",
        description="Start the service, ask it about one long document over HTTP, and stop it. "
        "Every request is sent twice: cold, with nothing to reuse, and warm. Fails if the two "
        "answers to one of them differ. Then start it again, and ask once more: what the tiers "
        "have is not computed again.",
    )
    add_model_arguments(parser, memory="256MiB")
    add_store_arguments(parser, default="memory, and a folder that is deleted at the end")
    parser.add_argument("--max-tokens", metavar="N", type=count, default=64, help="of an answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play, compare, print; 1 if the two answers to a request differ."""
    choose_threads(args)  # before torch comes
    name = "kvkeep-tiny" if args.model is None else args.model.resolve().name
    # The services end first: then all clients come to an end too, whatever they wait for.
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
            stats = clients.submit(get, url, "/kv/stats").result()
        with (
            _service(args, name, tiers) as (engine, again),
            progress("asking again", of=2) as advance,
        ):
            rows += demo.ask_again(again, engine, advance)
    if args.json:
        print(json.dumps(_as_json(url, name, rows, stats)))
    else:
        _print(rows)
    return 0 if all(row.same_text for row in rows) else DIFFERENT


@contextmanager
def _tiers(args: argparse.Namespace) -> Iterator[list[str]]:
    """The tiers that were named, or some that are gone afterwards."""
    if args.tier:
        yield args.tier
        return
    with tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as folder:
        yield ["memory://64MiB", f"file://{quote(folder)}?size=4GiB"]


@contextmanager
def _service(args: argparse.Namespace, name: str, tiers: list[str]) -> Iterator[tuple[Engine, str]]:
    """A model, a pool and a store, served from scratch: nothing is left of one before but tiers."""
    with progress("starting"):
        from kvkeep.core.cache import PagedCache  # noqa: PLC0415
        from kvkeep.serve.engine import Engine  # noqa: PLC0415 - seconds, for torch

        require("kvkeep.serve.server", "server")  # what it lacks is said before the model is loaded
    # float32: in half precision the order of summing can decide between two like tokens.
    runner, tokenizer = load(args, dtype="float32")
    with open_store(args, runner, name=name, tiers=tiers) as store:
        cache = PagedCache(runner.num_pages, runner.page_size)
        engine = Engine(runner, cache, tokenizer, store=store)
        with serving(engine, name) as url:
            yield engine, url


@contextmanager
def serving(engine: Engine, name: str) -> Iterator[str]:
    """Serve ``engine`` on a free port of this machine, as ``kvkeep serve`` does; gives the URL.

    In a thread, so that neither a process nor a port outlives this one, however it ends. At the
    end of the block the requests that still run are failed.
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
            # Interrupted before it has begun, it could not be stopped.
            wait((listening, served), return_when=FIRST_COMPLETED)
            if not served.done():
                listener.stop()
            served.result()


class Demo:
    """The script, played against one service and then the next.

    ``advance`` is called for each answer.
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
        """The whole conversation with the service at ``url``, row by row."""
        self._meet(url, engine, advance)
        first, *others = ASKED
        rows = self._both("first", [first])
        for name in others:
            rows += self._both("again", [name])
        rows += self._both("follow-up", [FOLLOW_UP], before=rows[-1])
        for tenant in TENANTS:
            rows += self._both(f"tenant {tenant}", [first], salt=f"tenant {tenant}")
        return rows + self._both("at once", CLIENTS)

    def ask_again(self, url: str, engine: Engine, advance: Callable[[], object]) -> list[DemoRow]:
        """What was asked first, of another service: its pool is empty."""
        self._meet(url, engine, advance)
        return self._both(RESTARTED, ASKED[:1])

    def _meet(self, url: str, engine: Engine, advance: Callable[[], object]) -> None:
        self._url, self._advance = url, advance
        self._chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
        warm_up = [{"role": "user", "content": _question(ASKED[0])}]
        # Torch's, unmeasured. Asked by a client's thread as all others are: an interrupt, which
        # comes to this one, then cannot come between a socket and its end.
        self._clients.submit(self._ask, warm_up, self._new_salt(), store=False).result()

    def _both(
        self,
        request: str,
        abouts: Sequence[str],
        *,
        before: DemoRow | None = None,
        salt: str | None = None,
    ) -> list[DemoRow]:
        """Ask about all of these at once, cold and then warm; ``before`` is the turn before."""
        talks = [self._talk(about, before) for about in abouts]
        colds = self._at_once([(talk, self._new_salt(), False) for talk in talks])
        warms = self._at_once([(talk, salt, True) for talk in talks])
        return [
            _row(request, about, cold, warm)
            for about, cold, warm in zip(abouts, colds, warms, strict=True)
        ]

    def _at_once(self, requests: Sequence[tuple[Talk, str | None, bool]]) -> list[Heard]:
        asked = [self._clients.submit(self._ask, *request) for request in requests]
        heard = []
        for one in asked:
            heard.append(one.result())
            self._advance()
        return heard

    def _ask(self, talk: Talk, salt: str | None, store: bool) -> Heard:
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
        """Nobody else has it: nothing of others is found under it."""
        self._salts += 1
        return f"cold {self._salts}"


def read_document() -> str:
    """The sections, each under its name, cut to whole paragraphs."""
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


def _row(request: str, about: str, cold: Heard, warm: Heard) -> DemoRow:
    assert not cold.cached_tokens, "nobody else has its salt"
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


def _totals(rows: list[DemoRow]) -> dict[str, float | None]:
    prompt = sum(row.prompt_tokens for row in rows)
    reused = sum(row.reused_tokens for row in rows)
    faster = [row.faster for row in rows if row.reused_tokens]
    return {
        "prompt_tokens": prompt,
        "reused_tokens": reused,
        "reused_share": reused / prompt,
        # Where nothing is reused there is nothing to be faster by.
        "ttft_median_ratio": median(faster) if faster else None,
    }


def _as_json(url: str, name: str, rows: list[DemoRow], stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "url": url,
        "model": name,
        "requests": [{**asdict(row), "faster": row.faster} for row in rows],
        "same_text": all(row.same_text for row in rows),
        **_totals(rows),
        **stats,
    }


def _print(rows: list[DemoRow]) -> None:
    console = require("rich.console", "cli").Console()
    say = partial(console.print, markup=False, highlight=False)
    say(
        f"{len(rows)} requests over HTTP about one document: {_question('…')}\n"
        "cold      every token is computed, and nothing kept\n"
        "warm      what others have computed before is reused\n"
        "TTFT      time to first token, as the client sees it\n"
        "tenant …  has a cache_salt of its own and shares with nobody\n"
        f"at once   {len(CLIENTS)} clients in the same moment, cold as well as warm\n"
        "restarted the service was stopped and started again: its pool is empty"
    )
    console.print(_table(rows))
    say(f"> {_question(rows[0].about)}\n{rows[0].text.strip()}\n")
    totals = _totals(rows)
    line = f"{totals['prompt_tokens']:,} prompt tokens, {totals['reused_share']:.0%} reused"
    if totals["ttft_median_ratio"] is not None:
        line += f"; answers that reuse began {totals['ttft_median_ratio']:.1f}× sooner (median)"
    say(line)
    last = rows[-1]
    say(
        f"After the restart {last.loaded_tokens:,} of {last.prompt_tokens:,} prompt tokens came "
        f"from disk:\nthe first token after {_milliseconds(last.ttft_warm_s)} instead of "
        f"{_milliseconds(last.ttft_cold_s)}"
    )
    if not all(row.same_text for row in rows):
        print("kvkeep: the warm answers are not the cold ones", file=sys.stderr)
    print(NEXT)  # as it is, whatever the width: it is to be copied


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
