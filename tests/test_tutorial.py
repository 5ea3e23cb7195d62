"""The tutorial, followed as a reader does: what its pages say that comes out comes out.

With KVKEEP_WRITE_TUTORIAL=1 in the environment, what comes out is written into the pages instead.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import warm
from kvkeep.core.cost import CostModel, PrefillCost
from warm import KVKEEP

if TYPE_CHECKING:
    from collections.abc import Iterator

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial"
_WRITE = "KVKEEP_WRITE_TUTORIAL" in os.environ
_WORDS = re.compile(r"(?<=hits)  .*")  # behind a node of a drawn tree
_BLOCK = re.compile(r"^```(json|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Page:
    """A page, whose blocks are compared with what comes out, or replaced by it."""

    def __init__(self, name: str) -> None:
        self.path = TUTORIAL / name

    def block(self, kind: str, number: int) -> str:
        """The text of a block: of the ``json`` or the ``text`` ones, counted from 0."""
        return self._match(kind, number)[2]

    def shown(self, number: int) -> Any:
        """The JSON that a block shows."""
        return json.loads(self.block("json", number))

    def came_out(self, number: int, told: Any) -> None:
        """This is what came out where a block shows JSON."""
        if told != self.shown(number):
            self._differs("json", number, textwrap.fill(
                json.dumps(told), 88, subsequent_indent=" ", break_long_words=False,
                break_on_hyphens=False,
            ))  # fmt: skip

    def drew(self, number: int, told: str) -> None:
        """This is what came out where a block shows text; words of the model may differ."""
        lines = [line.rstrip() for line in told.rstrip().splitlines()]
        shown = self.block("text", number).splitlines()
        if [_WORDS.sub("", one) for one in lines] != [_WORDS.sub("", one) for one in shown]:
            self._differs("text", number, "\n".join(lines))

    def _match(self, kind: str, number: int) -> re.Match[str]:
        found = [one for one in _BLOCK.finditer(self.path.read_text("utf-8")) if one[1] == kind]
        return found[number]

    def _differs(self, kind: str, number: int, told: str) -> None:
        match = self._match(kind, number)
        if not _WRITE:
            assert f"{told}\n" == match[2], f"{self.path.name}: KVKEEP_WRITE_TUTORIAL=1 writes it"
        text = match.string
        self.path.write_text(f"{text[: match.start(2)]}{told}\n{text[match.end(2) :]}", "utf-8")


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """`kvkeep serve` as the page starts it, with a cache directory of its own."""
    # Not inherited by processes of others in this run: the key, which the tutorial has not.
    env = {key: value for key, value in os.environ.items() if key != "KVKEEP_API_KEY"}
    env |= {"XDG_CACHE_HOME": str(folder), "PYTHONUNBUFFERED": "1", "COLUMNS": "80"}
    process = warm.Popen(
        [*KVKEEP, "serve", "--port", "0", "--memory", "64MiB", *options],
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
    reuse, store, missed = map(Page, ("reuse.md", "store.md", "missed.md"))
    ask = reuse.shown(0)
    with serving(tmp_path) as url:
        reuse.came_out(1, asked(url, ask)["usage"])
        ask["messages"][1]["content"] = "What does heapq.merge do?"
        reuse.came_out(2, asked(url, ask)["usage"])
        assert asked(url, ask)["usage"]["prompt_tokens_details"] == {"cached_tokens": 41}
        reuse.drew(0, run("tree", url))
    # A machine that is busy with other tests could be faster to compute so short a prompt.
    costs = tmp_path / "costs.json"
    CostModel(PrefillCost(seconds_per_token=1.0)).write(costs)
    with serving(tmp_path, "--cost", str(costs)) as url:
        store.came_out(0, asked(url, ask)["usage"])
        rules = ask["messages"][0]["content"]
        answers = []
        for time_of_day in ("22:14", "22:15"):
            ask["messages"][0]["content"] = f"It is {time_of_day}. {rules}"
            answers.append(asked(url, ask))
        before, answer = answers
        shown = missed.shown(0)
        missed.came_out(0, {**shown, "usage": answer["usage"]})
        # The page begins behind the line with the times of the request.
        told = _explained(url, answer["id"]).split(" prompt tokens\n", 1)[1]
        told = told.replace(answer["id"], shown["id"])
        other = _REQUEST.findall(missed.block("text", 0))[0]
        missed.drew(0, told.replace(before["id"], other))
    listed = run("store", "ls", f"file://{tmp_path}/kvkeep/store")
    assert len(listed.splitlines()) == 5, listed  # place, head, one namespace, budget, codecs


_REQUEST = re.compile(r"chatcmpl-[0-9a-f]+")


def _explained(url: str, name: str) -> str:
    """What `kvkeep explain` says once it knows that the request has ended."""
    for _ in range(100):
        told = run("explain", url, name)
        if "done" in told:
            return told
        time.sleep(0.1)
    raise AssertionError(told)
