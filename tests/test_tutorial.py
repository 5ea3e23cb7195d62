"""The tutorial, followed as a reader does: what its pages say that comes out comes out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import warm
from warm import KVKEEP

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial"
_BLOCK = re.compile(r"^```json\n(.*?)^```", re.DOTALL | re.MULTILINE)


def shown(page: str) -> list[Any]:
    """The JSON that a page shows, in order."""
    return [json.loads(block) for block in _BLOCK.findall((TUTORIAL / page).read_text("utf-8"))]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`kvkeep serve` as the page starts it, with a cache directory of its own."""
    # Not inherited by processes of others in this run: the key, which the tutorial has not.
    env = {key: value for key, value in os.environ.items() if key != "KVKEEP_API_KEY"}
    env |= {"XDG_CACHE_HOME": str(folder), "PYTHONUNBUFFERED": "1", "COLUMNS": "80"}
    process = warm.Popen(
        [*KVKEEP, "serve", "--port", "0", "--memory", "64MiB"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        yield re.search(r"http://\S+", said)[0]  # type: ignore[index]
        process.send_signal(signal.SIGINT)  # Ctrl-C
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def asked(url: str, question: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=question, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run(*words: str) -> str:
    done = warm.run(
        [*KVKEEP, *words],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"COLUMNS": "80"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    ask, nothing, shared = shown("reuse.md")
    (restarted,) = shown("store.md")
    (minute,) = shown("missed.md")
    with serving(tmp_path) as url:
        assert asked(url, ask)["usage"] == nothing
        ask["messages"][1]["content"] = "What does heapq.merge do?"
        assert asked(url, ask)["usage"] == shared
        assert asked(url, ask)["usage"]["prompt_tokens_details"] == {"cached_tokens": 41}
        drawn = httpx.get(f"{url}/kv/map", params={"format": "text"}).text
        assert "32 tokens · 2 pages [0,1]" in drawn
    with serving(tmp_path) as url:
        assert asked(url, ask)["usage"] == restarted
        rules = ask["messages"][0]["content"]
        for time_of_day in ("22:14", "22:15"):
            ask["messages"][0]["content"] = f"It is {time_of_day}. {rules}"
            answer = asked(url, ask)
        assert answer["usage"] == minute["usage"]
        told = _explained(url, answer["id"])
        assert _drawn(told) == _drawn((TUTORIAL / "missed.md").read_text("utf-8"))
    listed = run("store", "ls", f"file://{tmp_path}/kvkeep/store")
    assert len(listed.splitlines()) == 3, listed  # the place, the head, one namespace


def _drawn(text: str) -> list[str]:
    """The picture of an explanation, without the names of requests."""
    picture = text[text.index("█ 7 reused") :].split("```", 1)[0]
    return re.sub(r"chatcmpl-[0-9a-f]+", "chatcmpl-…", picture).rstrip().splitlines()


def _explained(url: str, name: str) -> str:
    """What `kvkeep explain` says once it knows that the request has ended."""
    for _ in range(100):
        told = run("explain", url, name)
        if "done" in told:
            return told
        time.sleep(0.1)
    raise AssertionError(told)
