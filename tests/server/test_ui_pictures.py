"""The pictures of the dashboard in docs/images are of the dashboard as it is.

    KVKEEP_PICTURES=docs/images pytest tests/server/test_ui_pictures.py

writes them anew; without it, nothing is done. Look at them before they are kept.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from browsing import PHONE, boxes, live
from see_help import storing

WRITE = os.environ.get("KVKEEP_PICTURES")
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not WRITE, reason="takes pictures only when asked to"),
]
LARGEST = 200_000  # bytes of one picture
ROUNDS = 8
MORE, MEANWHILE_MS = 3, 5000
LOOKS = {
    "dashboard": {"viewport": {"width": 1280, "height": 1760}, "color_scheme": "light"},
    "dashboard-dark": {"viewport": {"width": 1280, "height": 1760}, "color_scheme": "dark"},
    "dashboard-phone": {**PHONE, "viewport": {"width": 375, "height": 1100}},
}  # fmt: skip
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


def talk(server, who):
    """One conversation of several turns; every third has the time in its system prompt."""
    rules = f"It is 12:{who % 60:02}:07. {RULES}" if who % 3 == 2 else RULES * 2
    messages = [{"role": "system", "content": rules}]
    more = {"kvkeep": {"session": f"chat-{who:03}"}}
    if who % 4 == 1:
        more["cache_salt"] = ("acme", "globex", "initech")[who % 3]
    for turn in range(2 + who % 3):
        messages.append({"role": "user", "content": TOPICS[(who + turn) % len(TOPICS)]})
        body = {"messages": messages, "max_tokens": 24, **more}
        answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        messages.append(answer["choices"][0]["message"])


def play(server, first, last):
    """Rounds of conversations at the same time, with a pause after each."""
    with ThreadPoolExecutor(3) as pool:
        for number in range(first, last):
            list(pool.map(partial(talk, server), range(number * 3, number * 3 + 3)))
            time.sleep(0.5)


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A server that conversations were held with, over memory and a disk."""
    tiers = ("memory://64MiB", f"file://{tmp_path_factory.mktemp('disk')}/kv?size=256MiB")
    with storing(*tiers, num_pages=320, what_if=1.0) as server:
        play(server, 0, ROUNDS)
        yield server


def shrink(path):
    """Reduce the colours of a picture that is too large for a repository."""
    image = pytest.importorskip("PIL.Image")
    for colours in (256, 128, 64):
        if path.stat().st_size <= LARGEST:
            return
        with image.open(path) as one:
            reduced = one.convert("RGB").quantize(
                colours, method=image.Quantize.MAXCOVERAGE, dither=image.Dither.NONE
            )
        reduced.save(path, optimize=True)


@pytest.mark.parametrize("name", LOOKS)
def test_a_picture_is_taken(busy, opened, tmp_path, name):
    taken = tmp_path / f"{name}.png"
    with opened(busy, **LOOKS[name]) as page, ThreadPoolExecutor(1) as meanwhile:
        live(page)
        boxes(page)
        talking = meanwhile.submit(play, busy, ROUNDS, ROUNDS + MORE)
        page.locator("#colour").select_option("hits")
        page.wait_for_timeout(MEANWHILE_MS)
        page.evaluate("scrollTo(0, 0)")
        taken.write_bytes(page.screenshot())
        talking.result()
    shrink(taken)
    assert taken.stat().st_size <= LARGEST
    (Path(WRITE) / taken.name).write_bytes(taken.read_bytes())
