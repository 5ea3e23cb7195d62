"""Take the pictures of the dashboard that are in docs/images: a real server, a few conversations.

    python scripts/screenshot.py                  # light and dark, into docs/images
    python scripts/screenshot.py --into /tmp/x    # somewhere else, to look at

Serves the bundled model with two tiers, lets tenants talk for a while, and looks at the page with
Chromium (Debian: apt-get install chromium). Needs the development tools.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

IMAGES = Path(__file__).parents[1] / "docs/images"
LARGEST = 200_000  # bytes of one picture
SIZE = (1280, 1560)
ROUNDS = 14
PATIENCE_S = 60.0
RULES = (
    "You are a careful assistant for people who write Python. Answer in one short paragraph, give "
    "an example where it helps, and name the module that a function is in. "
)
TOPICS = [
    "How do I remove common leading whitespace from a text?",
    "What does textwrap.shorten do with words that do not fit?",
    "How do I read a CSV file into dictionaries?",
    "What is the difference between deepcopy and copy?",
    "How do I join paths on every system?",
    "When is functools.lru_cache a bad idea?",
]


@contextmanager
def server(folder: str) -> Iterator[str]:
    """Start a server on a free port; yield its URL."""
    command = [
        sys.executable, "-m", "kvkeep", "serve", "--port", "0", "--name", "kvkeep-tiny",
        "--memory", "12MiB", "--block-tokens", "64",
        "--tier", "memory://64MiB", "--tier", f"file://{folder}?size=1GiB",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"at (http://\S+)", process.stdout.readline())
            if found is None:
                sys.exit("the server did not start; its own words are above")
            yield found[1]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def talk(url: str, who: int) -> None:
    """Run one conversation of several turns; every third has the time in its system prompt."""
    messages = [{"role": "system", "content": _rules(who)}]
    more: dict[str, object] = {"kvkeep": {"session": f"chat-{who:03}"}}
    if who % 4 == 1:
        more["cache_salt"] = "acme"
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for turn in range(2 + who % 4):
            messages.append({"role": "user", "content": TOPICS[(who + turn) % len(TOPICS)]})
            body = {"messages": messages, "max_tokens": 32, **more}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            messages.append(answer["choices"][0]["message"])


def _rules(who: int) -> str:
    return f"It is 12:{who % 60:02}:07. {RULES}" if who % 3 == 2 else RULES * 2


def play(url: str, first: int, last: int) -> None:
    """Run rounds of concurrent conversations, with a pause after each."""
    with ThreadPoolExecutor(3) as pool:
        for number in range(first, last):
            list(pool.map(partial(talk, url), range(number * 3, number * 3 + 3)))
            time.sleep(1.5)


def picture(browser: Browser, url: str, look: str, path: Path) -> None:
    """Take a picture of the page with one node selected."""
    width, height = SIZE
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if look == "dark" else "light",
        reduced_motion="reduce",
    )
    page.goto(url)
    page.locator("#picture [role=treeitem]").first.wait_for()
    page.locator("#requests-list li").first.wait_for()
    page.locator("#colour").select_option("hits")
    page.wait_for_timeout(6000)  # small lines grow with each answer
    page.evaluate("scrollTo(0, 0)")
    path.write_bytes(page.screenshot())
    page.close()


def shrink(path: Path) -> None:
    """Reduce the colours of a large picture; exit if it stays too large."""
    from PIL import Image  # noqa: PLC0415 - comes with matplotlib, needed at times

    for colours in (256, 128, 64):
        if path.stat().st_size <= LARGEST:
            return
        with Image.open(path) as image:
            reduced = image.convert("RGB").quantize(
                colours, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
            )
        reduced.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        sys.exit(f"{path} has {path.stat().st_size:,} bytes; {LARGEST:,} are allowed")


def main() -> None:
    """Start the server, run conversations, take pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=IMAGES)
    into: Path = parser.parse_args().into
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium is installed (Debian: apt-get install chromium)")
    into.mkdir(parents=True, exist_ok=True)
    rights = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, server(folder) as url:
        play(url, 0, ROUNDS)
        with sync_playwright() as playwright, ThreadPoolExecutor(1) as meanwhile:
            browser = playwright.chromium.launch(executable_path=chromium, args=rights)
            for look, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
                talking = meanwhile.submit(play, url, ROUNDS, ROUNDS + 5)
                picture(browser, url, look, into / name)
                talking.result()
                shrink(into / name)
                print(f"{into / name}: {(into / name).stat().st_size:,} bytes")
            browser.close()


if __name__ == "__main__":
    main()
