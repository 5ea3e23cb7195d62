"""The dashboard over a large tree: time to the first picture, and processor time of the server.

It starts a server with the bundled model's tokenizer and a cache that is filled without computing:
100,000 nodes by default, of prompts that branch like conversations. Then it opens a page in
headless Chromium and measures the seconds from the address to the first picture of the tree (and to
live figures), several times, and the processor time of the server while one page is open.

    python benchmarks/dashboard.py
    python benchmarks/dashboard.py --nodes 20000 --seconds 30

Needs the development tools, and Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE_SIZE = 4
GOAL_S, GOAL_CPU = 2.0, 0.05
PICTURE = "#picture [role=treeitem]"


def serve(nodes: int) -> None:
    """Fill a cache and serve it; print the URL on a line."""
    from kvkeep.core.cache import PagedCache  # noqa: PLC0415 - seconds, in this process alone
    from kvkeep.serve.engine import Engine, Runner, Tokenizer  # noqa: PLC0415
    from kvkeep.serve.models import bundled_model  # noqa: PLC0415
    from kvkeep.serve.server import Listener, ServerSettings, bind, create_app, url_of  # noqa: PLC0415

    pages = 4 * nodes
    runner = Runner.load(bundled_model(), num_pages=pages, page_size=PAGE_SIZE, device="cpu")
    cache = PagedCache(pages, PAGE_SIZE)
    tokenizer = Tokenizer.load(bundled_model())
    fill(cache, nodes)
    app = create_app(Engine(runner, cache, tokenizer), ServerSettings(name="kvkeep-tiny"))
    bound = bind("127.0.0.1", 0)
    print(url_of(bound), flush=True)
    asyncio.run(Listener(app).serve([bound]))


def fill(cache: object, nodes: int) -> None:
    """Store prompts of some tenants: each continues part of an earlier prompt, or is new."""
    from kvkeep.core.cache import PagedCache  # noqa: PLC0415

    assert isinstance(cache, PagedCache)
    chance = random.Random(7)
    known: list[tuple[str, list[int]]] = []
    made = 0
    while made < nodes:
        if known and chance.random() < 0.97:
            space, before = known[chance.randrange(len(known))]
            before = before[: PAGE_SIZE * chance.randint(1, len(before) // PAGE_SIZE)]
        else:
            space, before = f"tenant-{chance.randrange(8)}", []
        own = PAGE_SIZE * chance.choice((1, 1, 2, 4))
        prompt = [*before, *(chance.randrange(300, 2000) for _ in range(own))]
        if len(prompt) > 40 * PAGE_SIZE:
            continue
        with cache.open([*prompt, 1], space) as sequence:
            sequence.copies()
            sequence.publish(len(prompt))
        if len(known) < 30_000:
            known.append((space, prompt))
        made += 1


def cpu_s(process: int) -> float:
    """Return the processor time of the process (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, process: int, times: int, seconds: float) -> None:
    """Open the page several times, then keep one open."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium is installed (Debian: apt-get install chromium)")
    rights = ["--no-sandbox"] if os.geteuid() == 0 else []
    pictures, lives = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=rights)
        for _ in range(times):
            page = browser.new_page(viewport={"width": 1280, "height": 1600})
            begun = time.perf_counter()
            page.goto(url, wait_until="commit")
            page.locator("#state[data-state=live]").wait_for()
            lives.append(time.perf_counter() - begun)
            page.locator(PICTURE).first.wait_for()
            pictures.append(time.perf_counter() - begun)
            drawn = page.locator(PICTURE).count()
            said = page.locator("#kept-sum").inner_text().partition(".")[0]
            page.close()
        page = browser.new_page(viewport={"width": 1280, "height": 3000})
        page.goto(url)
        page.locator(PICTURE).first.wait_for()
        page.wait_for_timeout(2000)
        before, begun = cpu_s(process), time.perf_counter()
        page.wait_for_timeout(1000 * seconds)
        share = (cpu_s(process) - before) / (time.perf_counter() - begun)
        page.close()
        time.sleep(2)  # and what it costs with nobody there
        before, begun = cpu_s(process), time.perf_counter()
        time.sleep(5)
        idle = (cpu_s(process) - before) / (time.perf_counter() - begun)
        browser.close()
    print(f"{said}; {drawn} of them drawn")
    print(f"live figures      {_spread(lives)}")
    print(f"first picture     {_spread(pictures)}   goal {GOAL_S} s")
    print(f"server, one page  {100 * share:.1f} % of a core (with none: {100 * idle:.1f} %)   "
          f"goal {100 * GOAL_CPU:.0f} %")  # fmt: skip


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Start the server process and measure it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=100_000, help="default: 100,000")
    parser.add_argument("--times", type=int, default=5, help="that the page is opened")
    parser.add_argument("--seconds", type=float, default=20.0, help="that it is left open")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.nodes)
        return
    command = [sys.executable, __file__, "--serve", "--nodes", str(args.nodes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                sys.exit("the server did not start; its own words are above")
            measure(url, process.pid, args.times, args.seconds)
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
