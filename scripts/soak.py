"""Soak: run the server, the cache and the store under stress for a long time, and check them.

    python scripts/soak.py --minutes 20

Three parts run side by side, each in separate processes:

server  An HTTP server whose pool is too small for its clients (constant eviction), over a disk that
        takes 20 ms a call. Clients send prompts with known answers, new prompts, requests for
        several answers (forks), and many disconnect in the middle. Checked: every complete answer
        equals that of an engine without reuse; the server's memory does not grow.
cache   A `PagedCache` with forks, rejected drafts, soft and hard pins. Checked: every page that is
        returned as cached holds exactly the requested tokens; `check()` recounts.
store   A writer over a slow disk with room for 800 blocks that is killed with SIGKILL at random
        instants. Checked: the directory never exceeds its budget. The next process checks that the
        newest 400 blocks flushed before the kill exist, bit by bit, and that no more of the older
        ones are missing than were evicted.

The time starts when all parts run. The script ends with a summary, and with exit status 1 if a
check failed, or if an event that a part should exercise never happened: evictions, disconnects,
forks, pins, kills, tokens from tiers. Run it for at least a minute. Memory is the resident set of
each process, read every five seconds; growth is the median of the last quarter divided by that of
the second quarter, because caches and bounded records fill in the first.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # faults: for tests alone

SLOW_S = 0.02
GROWTH_MAX = 1.10
ANSWER_TOKENS = 12
KNOWN_PROMPTS = 40
CLIENTS = 8
RECORD_BYTES = 20_000
DISK_BYTES = 16 << 20
NEWEST = 400
BATCH = 30
"""Blocks that a writer puts between two flushes, at most."""


def main() -> int:
    """Run all parts, or one of them as a child process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--only", choices=("server", "cache", "store"), help="run one part alone")
    parser.add_argument("--json", type=Path, help="write the summary to this file, too")
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.child is not None:
        CHILDREN[args.child](args)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvkeep-soak-") as folder:
        return soak(args, Path(folder))


def soak(args: argparse.Namespace, folder: Path) -> int:
    """Run the three parts until the time is over; return the exit status."""
    parts = [ServerPart(folder, args.seed), CachePart(folder, args), StorePart(folder, args.seed)]
    parts = [part for part in parts if args.only in (None, part.name)]
    for part in parts:
        part.prepare()
    until = time.monotonic() + args.minutes * 60
    threads = [threading.Thread(target=part.run, args=(until,), name=part.name) for part in parts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(5)
        for part in parts:
            part.sample()
        left = max(0.0, until - time.monotonic())
        print(f"\r{left:6.0f} s left  " + "  ".join(map(str, parts)), end="", flush=True)
    print()
    summary = {part.name: part.summary() for part in parts}
    text = json.dumps(summary, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    failures = [failure for part in parts for failure in part.failures()]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


class Part:
    """One part of the soak: its counts, its failures, and the memory of its child process.

    ``needed`` names the counts that must not be zero at the end.
    """

    name = ""
    needed: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.memory_mib: list[float] = []
        self.child: subprocess.Popen[str] | None = None

    def __str__(self) -> str:
        memory = f", {self.memory_mib[-1]:.0f} MiB" if self.memory_mib else ""
        return f"{self.name}: {sum(self.counts.values()):,} checks{memory}"

    def run(self, until: float) -> None:
        """Work until ``time.monotonic()`` is ``until``; an exception is a failure of the part."""
        try:
            self.work(until)
        except Exception as error:  # noqa: BLE001 - reported as a failure of the soak
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            if self.child is not None:
                self.child.kill()
                self.child.wait()

    def prepare(self) -> None:
        """Prepare before the time starts."""

    def work(self, until: float) -> None:
        """Run the work of the part."""
        raise NotImplementedError

    def start(self, child: str, folder: Path, *more: str) -> subprocess.Popen[str]:
        """Start this script as ``child``."""
        command = [sys.executable, __file__, "--child", child, "--folder", str(folder), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def sample(self) -> None:
        """Record the memory of the child."""
        if self.child is None or self.child.poll() is not None:
            return
        try:
            status = Path(f"/proc/{self.child.pid}/status").read_text(encoding="ascii")
        except OSError:
            return
        lines = [line for line in status.splitlines() if line.startswith("VmRSS")]
        if lines:
            self.memory_mib.append(int(lines[0].split()[1]) / 1024)

    def growth(self) -> float | None:
        """Memory of the last quarter divided by that of the second; None with few samples."""
        quarter = len(self.memory_mib) // 4
        if quarter < 3:
            return None
        second, last = self.memory_mib[quarter : 2 * quarter], self.memory_mib[-quarter:]
        return statistics.median(last) / statistics.median(second)

    def summary(self) -> dict[str, Any]:
        """Return the text printed at the end."""
        growth = self.growth()
        told: dict[str, Any] = {**self.counts, "errors": self.errors[:20]}
        if growth is not None:
            every = max(1, len(self.memory_mib) // 12)
            told["memory_mib"] = [round(value) for value in self.memory_mib[::every]]
            told["memory_growth"] = round(growth, 4)
        return told

    def failures(self) -> list[str]:
        """Return the failures."""
        failures = [f"{self.name}: {error}" for error in self.errors]
        failures += [f"{self.name}: {what}: none" for what in self.needed if not self.counts[what]]
        growth = self.growth()
        if growth is not None and growth > GROWTH_MAX:
            failures.append(f"{self.name}: memory grew by {growth - 1:.1%}")
        return failures


# --- the server -----------------------------------------------------------------------------------


def known_prompts() -> list[list[int]]:
    """Return prompts of a few families with common prefixes, as token ids."""
    chance = np.random.default_rng(7)
    heads = [chance.integers(10, 4000, size).tolist() for size in (300, 180, 90, 40)]
    return [
        heads[at % len(heads)] + chance.integers(10, 4000, 5 + at).tolist()
        for at in range(KNOWN_PROMPTS)
    ]


def remember_little() -> None:
    """Lower the bounds on a server's memory of past requests.

    As they ship they are reached after hours and some hundred MB. These are reached at once, so
    memory that grows is a leak.
    """
    from kvkeep.observe.explain import Explainer  # noqa: PLC0415

    for bound in (
        "kvkeep.core.cache.sessions._MOST_SESSIONS",
        "kvkeep.serve.engine.offload.offload._MOST_TENANTS",
        "kvkeep.serve.engine.offload.writes._REMEMBERED",
        "kvkeep.observe.usage.history._MOST_TIMES",
        "kvkeep.store.tiers.tiering._MOST_COUNTED",
    ):
        where, name = bound.rsplit(".", 1)
        module = importlib.import_module(where)
        assert isinstance(getattr(module, name), int), bound
        setattr(module, name, 200)
    defaults = Explainer.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(requests=100, prompt_tokens=20_000)


def serve(args: argparse.Namespace) -> None:
    """Child: serve the bundled model over a slow disk; print the URL, end with stdin."""
    import asyncio  # noqa: PLC0415

    from faults import FaultyBackend  # noqa: PLC0415
    from kvkeep.serve.engine import Engine, Limits, Runner, Tokenizer  # noqa: PLC0415
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415
    from kvkeep.serve.server import Listener, ServerSettings, bind, create_app, url_of  # noqa: PLC0415
    from kvkeep.store import KVStore  # noqa: PLC0415
    from kvkeep.store.backends.disk import DiskBackend  # noqa: PLC0415

    remember_little()
    runner = Runner.load(
        bundled_model(), num_pages=256, page_size=16, device="cpu", dtype="float32"
    )
    disk = FaultyBackend(DiskBackend(args.folder, capacity=64 << 20))
    disk.slow(SLOW_S, "put", "get", "flush", "delete")
    store = KVStore(runner.geometry, model="soak@1", tiers=["memory://8MiB", disk], block_tokens=64)
    engine = Engine(
        runner,
        runner.cache(eviction="returns", what_if=0.1),
        Tokenizer.load(bundled_model()),
        limits=Limits(max_running=8, max_waiting=64),
        store=store,
    )
    bound = bind("127.0.0.1", 0)

    def ready() -> None:
        print(url_of(bound), flush=True)

    asyncio.run(
        Listener(create_app(engine, ServerSettings(name="soak")), ready=ready).serve([bound])
    )


class ServerPart(Part):
    """Clients of the server, and their observations."""

    name = "server"
    needed = (
        "answers compared",
        "answers, new",
        "answers, fork",
        "clients that left",
        "evicted pages",
        "tokens from the pool",
        "tokens from tiers",
    )

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self._folder = folder / "server"
        self._seed = seed
        self._lock = threading.Lock()
        self._prompts = known_prompts()
        self._expected: list[str] = []
        self._url = ""

    def prepare(self) -> None:
        """Compute the answers to compare with, and start the server."""
        self._expected = self._alone()
        self.child = self.start("server", self._folder)
        assert self.child.stdout is not None
        self._url = self.child.stdout.readline().strip()

    def work(self, until: float) -> None:
        """Send requests until the time is over."""
        assert self.child is not None
        clients = [
            threading.Thread(target=self._client, args=(until, number)) for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        stats = httpx.get(f"{self._url}/kv/stats", timeout=30).json()
        self.counts["evicted pages"] = int(stats["cache"].get("evicted_pages", 0))
        self.counts["tokens from the pool"] = int(stats["cache"].get("hit_tokens", 0))
        self.counts["tokens from tiers"] = int((stats["store"] or {}).get("hit_tokens", 0))
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(60)

    def _alone(self) -> list[str]:
        """Return the answers of an engine without reuse."""
        from kvkeep.serve.engine import Engine, Runner, SamplingParams, Tokenizer  # noqa: PLC0415
        from kvkeep.serve.models import bundled_model  # noqa: PLC0415

        runner = Runner.load(
            bundled_model(), num_pages=256, page_size=16, device="cpu", dtype="float32"
        )
        engine = Engine(
            runner,
            runner.cache(reuse=False),
            Tokenizer.load(bundled_model()),
        )
        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return [engine.generate([prompt], params)[0].text for prompt in self._prompts]

    def _client(self, until: float, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while time.monotonic() < until:
                try:
                    self._ask(http, chance)
                except httpx.HTTPError as error:
                    self._note("failed requests")
                    self.errors.append(f"{type(error).__name__}: {error}")

    def _ask(self, http: httpx.Client, chance: random.Random) -> None:
        kind = chance.choices(("known", "new", "leave", "fork", "salted"), (8, 4, 4, 2, 2))[0]
        at = chance.randrange(len(self._prompts))
        body: dict[str, Any] = {
            "prompt": self._prompts[at],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "kvkeep": {"session": f"session-{chance.randrange(200)}"},
            "ignore_eos": True,
        }
        if kind == "new":
            body["prompt"] = [chance.randrange(10, 4000) for _ in range(chance.randrange(20, 600))]
        if kind == "fork":
            body.update(n=4, temperature=1.0, seed=chance.randrange(1000))
        if kind == "salted":
            body["cache_salt"] = f"salt-{chance.randrange(5000)}"
        if kind == "leave":
            body.update(stream=True, max_tokens=200)
            with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    self._note(f"status {answer.status_code}")
                    return
                for seen, _ in enumerate(answer.iter_lines()):
                    if seen >= chance.randrange(6):
                        break
            self._note("clients that left")
            return
        answer = http.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            self._note(f"status {answer.status_code}")
            if answer.status_code not in (429, 503):
                self.errors.append(f"{answer.status_code}: {answer.text[:200]}")
            return
        texts = [choice["text"] for choice in answer.json()["choices"]]
        if kind in ("known", "salted"):
            self._note("answers compared")
            if texts != [self._expected[at]]:
                self.errors.append(f"prompt {at}: {texts[0]!r} instead of {self._expected[at]!r}")
        else:
            self._note(f"answers, {kind}")

    def _note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


# --- the cache ------------------------------------------------------------------------------------


CHURNED = (
    "operations", "evicted pages", "forks", "drafts taken back", "soft pins", "hard pins"
)  # fmt: skip


class Churn:
    """Random operations on one `PagedCache`, with the contents of pages as arrays."""

    PAGES, PAGE_SIZE, LIVE, PINS = 400, 4, 40, 100

    def __init__(self, seed: int) -> None:
        from kvkeep import PagedCache  # noqa: PLC0415

        self.cache = PagedCache(self.PAGES, self.PAGE_SIZE)
        self._chance = random.Random(seed)
        self._memory = np.full((self.PAGES, self.PAGE_SIZE), -1, np.int32)
        self._live: list[Any] = []
        self._pins: list[Any] = []
        self.counts = Counter[str](dict.fromkeys(CHURNED, 0))

    def step(self) -> None:
        """Run one operation, and check the page contents of the newest sequence."""
        from kvkeep import NotCached, OutOfPages  # noqa: PLC0415

        steps = (self._open, self._append, self._fork, self._truncate, self._publish, self._pin)
        step = self._chance.choices(steps, (40, 15, 10, 5, 10, 5))[0]
        try:
            if self._live or step == self._open:
                step()
        except OutOfPages:
            if self._live:
                self._any(remove=True).close()
        while len(self._live) > self.LIVE or (self._live and self._chance.random() < 0.05):
            sequence = self._any(remove=True)
            self._fill(sequence, sequence.num_tokens)
            sequence.publish()
            sequence.close()
        while len(self._pins) > self.PINS:
            pin = self._pins.pop(self._chance.randrange(len(self._pins)))
            with suppress(NotCached):  # a soft pin ends when its pages are evicted
                self.cache.unpin(pin)
        for sequence in self._live[-1:]:
            held = self._memory[np.asarray(sequence.pages)].reshape(-1)[: sequence.num_tokens]
            assert (held == np.asarray(sequence.tokens)).all(), "a page holds other tokens"

    def _any(self, *, remove: bool = False) -> Any:
        at = self._chance.randrange(len(self._live))
        return self._live.pop(at) if remove else self._live[at]

    def _fill(self, sequence: Any, start: int) -> None:
        """Do the page copies, then write the tokens from ``start`` on, as an engine would."""
        for copy in sequence.copies():
            self._memory[copy.dst, : copy.tokens] = self._memory[copy.src, : copy.tokens]
        tokens = np.asarray(sequence.tokens)
        for at in range(start, len(tokens)):
            self._memory[sequence.pages[at // self.PAGE_SIZE], at % self.PAGE_SIZE] = tokens[at]

    def _prompt(self) -> list[int]:
        family = self._chance.randrange(30)
        head = [family, family % 7] * self._chance.randrange(1, 20)
        return head + [self._chance.randrange(4) for _ in range(self._chance.randrange(1, 60))]

    def _open(self) -> None:
        sequence = self.cache.open(self._prompt())
        self._fill(sequence, sequence.num_cached)
        self._live.append(sequence)

    def _append(self) -> None:
        sequence = self._any()
        before = sequence.num_tokens
        sequence.append([self._chance.randrange(4) for _ in range(self._chance.randrange(1, 9))])
        self._fill(sequence, before)

    def _fork(self) -> None:
        self._live.append(self._any().fork())
        self.counts["forks"] += 1

    def _truncate(self) -> None:
        sequence = self._any()
        sequence.truncate(max(1, sequence.num_tokens - self._chance.randrange(1, 5)))
        self._fill(sequence, sequence.num_tokens)
        self.counts["drafts taken back"] += 1

    def _publish(self) -> None:
        sequence = self._any()
        self._fill(sequence, sequence.num_tokens)
        sequence.publish()

    def _pin(self) -> None:
        text = self._prompt()
        if self.cache.match(text).num_tokens >= self.PAGE_SIZE:
            hard = self._chance.random() < 0.1
            self._pins.append(self.cache.pin(text, hard=hard))
            self.counts["hard pins" if hard else "soft pins"] += 1


def churn(args: argparse.Namespace) -> None:
    """Child: drive a `PagedCache`; print the counts of `CHURNED`."""
    os.nice(10)  # it never waits, and must leave time to the other parts
    driver = Churn(args.seed)
    for operation in itertools.count(1):
        driver.step()
        if operation % 500 == 0:
            driver.cache.check()
            driver.counts["operations"] = operation
            driver.counts["evicted pages"] = driver.cache.stats().evicted_pages
            print(*(driver.counts[what] for what in CHURNED), flush=True)


class CachePart(Part):
    """Watches the child that drives the cache."""

    name = "cache"
    needed = CHURNED

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__()
        self._folder = folder
        self._seed = args.seed

    def work(self, until: float) -> None:
        """Read the child's counts until the time is over, and check that they increase."""
        self.child = self.start("cache", self._folder, "--seed", str(self._seed))
        assert self.child.stdout is not None
        while time.monotonic() < until:
            line = self.child.stdout.readline()
            if not line:
                self.errors.append(f"the child ended with status {self.child.wait()}")
                return
            for what, number in zip(CHURNED, line.split(), strict=True):
                self.counts[what] = int(number)


# --- the store ------------------------------------------------------------------------------------


def key_of(number: int) -> bytes:
    """Return the key of a block."""
    return hashlib.sha256(b"%d" % number).digest()


def payload_of(number: int) -> bytes:
    """Return the unique bytes of a block."""
    return np.random.default_rng(number).bytes(RECORD_BYTES)


def open_blocks(folder: Path) -> Any:
    """The store under test: a small memory tier over a slow disk."""
    from faults import FaultyBackend  # noqa: PLC0415
    from kvkeep.store import BlockStore  # noqa: PLC0415
    from kvkeep.store.backends.disk import DiskBackend  # noqa: PLC0415

    disk = FaultyBackend(DiskBackend(folder, capacity=DISK_BYTES))
    disk.slow(SLOW_S / 4, "put", "flush")
    return BlockStore("soak", tiers=["memory://2MiB", disk])


def write(args: argparse.Namespace) -> None:
    """Child: verify the flushed blocks ``0 … seed``, then write more until killed.

    Prints ``lost N`` for each of the newest that is not there, ``wrong N`` for each that is another
    one, ``ok G`` when all are verified, of which G are gone, and ``flushed M E`` after each batch,
    with the blocks that were evicted since this process began. A disk that is too slow for a read
    is a miss as well, so a block is lost if it is not there for ten seconds. One that is too slow
    for a write drops it, and counts that; such a batch is put again.
    """
    store = open_blocks(args.folder)
    room, gone = bytearray(RECORD_BYTES), 0
    for number in range(args.seed):
        newest, until = number >= args.seed - NEWEST, time.monotonic() + 10
        while not (found := store.get([key_of(number)], [memoryview(room)])):
            if not newest or time.monotonic() > until:
                break
            time.sleep(0.1)
        if not found:
            gone += 1
            if newest:
                print(f"lost {number}", flush=True)
        elif room != payload_of(number):
            print(f"wrong {number}", flush=True)
    print(f"ok {gone}", flush=True)
    number = args.seed
    while True:
        count = random.randrange(1, BATCH)
        numbers = range(number, number + count)
        dropped = store.stats()[1].counters["drops"]
        kept = store.put([key_of(n) for n in numbers], [payload_of(n) for n in numbers], wait=30)
        flushed = kept == count and store.flush(60)
        now = store.stats()[1].counters
        if flushed and now["drops"] == dropped:
            number += count
        print(f"flushed {number} {now['evictions']}", flush=True)


class StorePart(Part):
    """Kills the writer at random instants, and starts the next."""

    name = "store"
    needed = ("kills", "blocks flushed", "blocks verified after a kill", "evictions", "gone")

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self._folder = folder / "store"
        self._chance = random.Random(seed)
        self._flushed = 0  # blocks 0 … of the directory
        self._evicted = 0  # of them, by what killed writers said
        self._kills = 0  # of writers in this directory

    def sample(self) -> None:
        """Do nothing: writers live for seconds, so their memory is not significant."""

    def work(self, until: float) -> None:
        """Kill and restart until the time is over."""
        while time.monotonic() < until:
            if self._flushed > 20_000:
                shutil.rmtree(self._folder)
                self._flushed = self._evicted = self._kills = 0
            self.child = self.start("store", self._folder, "--seed", str(self._flushed))
            # From the moment that it writes: processes may take long to start.
            alarm = threading.Timer(self._chance.uniform(0.5, 8), self.child.kill)
            assert self.child.stdout is not None
            before, evicted = self._flushed, 0
            for line in self.child.stdout:
                word, number, *more = line.split()
                if word == "ok":
                    self._account(before, int(number))
                    alarm.start()
                elif word == "flushed":
                    self.counts["blocks flushed"] += int(number) - self._flushed
                    self._flushed, evicted = int(number), int(more[0])
                else:
                    self.errors.append(f"block {number} of {before} that were flushed is {word}")
            alarm.cancel()
            if (status := self.child.wait()) != -signal.SIGKILL:
                self.errors.append(f"a writer ended with status {status}")
                return
            used = sum(-(-path.stat().st_size // 4096) * 4096 for path in self._folder.glob("*/*"))
            if used > DISK_BYTES:
                self.errors.append(f"the directory has {used} bytes of {DISK_BYTES}")
            self._evicted += evicted
            self._kills += 1
            self.counts["kills"] += 1
            self.counts["evictions"] += evicted

    def _account(self, flushed: int, gone: int) -> None:
        """Of ``flushed`` blocks ``gone`` are not there: no more than were evicted.

        A writer that was killed may have evicted for one batch more than it had said.
        """
        self.counts["blocks verified after a kill"] += flushed - gone
        self.counts["gone"] = max(self.counts["gone"], gone)
        if gone > self._evicted + self._kills * BATCH:
            self.errors.append(
                f"of {flushed} flushed blocks {gone} are gone, and {self._evicted} were evicted"
            )


CHILDREN = {"server": serve, "cache": churn, "store": write}

if __name__ == "__main__":
    sys.exit(main())
