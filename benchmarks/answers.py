"""What a store writes of answers, and what of it is ever read: reasoning that prompts leave out.

    python benchmarks/answers.py [--quick] [--json]

Conversations as of ``kvkeep trace generate reasoning``: four of five answers begin with reasoning,
which the next prompt lacks. Once they are served over a real `KVStore`, with a quarter of the
tokens in blocks of 16; once the generated trace is replayed through tiers. Each is done twice: all
answers are stored whole; then the store learns what of them is read. Nothing is evicted.

"Stored" is the KV of all records, "read" that of all records that a later request read. What the
last turn of a conversation stored is not counted: nothing could tell that it was the last one.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from figures import Figure, show
from kvkeep.bench.replay import Workload, tiered
from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.bench.traces import generate
from kvkeep.bench.traces.generators.chance import Chance, zipf
from kvkeep.bench.traces.generators.reasoning import Reasoning
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.returns import Ended
from kvkeep.store import KVStore
from kvkeep.store.tiers import Inclusive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.core.tokens import TokenArray

BLOCK, SCALE = 16, 4
GEOMETRY = KVGeometry(1, 1, 4, "float16")
THINK, STOP = 1, Ended("stop 2")


@dataclass
class Books:
    """Which turn stored each record first, and which records were read."""

    sizes: dict[bytes, int] = field(default_factory=dict)
    turns: dict[bytes, int] = field(default_factory=dict)
    read: set[bytes] = field(default_factory=set)
    asked: int = 0
    hits: int = 0

    def stored(self, turn: int, blocks: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Record what a turn stored."""
        for block, size in zip(blocks, sizes, strict=True):
            self.sizes.setdefault(block, size)
            self.turns.setdefault(block, turn)

    def ratio(self, last: set[int]) -> float:
        """Return stored over read, without what the ``last`` turns of conversations stored."""
        stored = sum(size for block, size in self.sizes.items() if self.turns[block] not in last)
        return stored / sum(self.sizes[block] for block in self.read)


# --- a real store --------------------------------------------------------------------------------


@dataclass(order=True)
class Talk:
    """A conversation: its next turn's time, its prompt, the turns left."""

    time: float
    number: int
    prompt: TokenArray = field(compare=False)
    left: int = field(compare=False)


def turns(requests: int) -> Iterator[tuple[int, int, TokenArray, TokenArray]]:
    """Yield requests by time: their number, their conversation, prompt and prompt with answer."""
    spec, chance, draw = Reasoning(), Chance("answers"), np.random.default_rng(0)

    def tokens(count: int) -> TokenArray:
        return draw.integers(10, 30_000, max(1, count // SCALE)).astype(np.int32)

    systems = [tokens(chance.whole(spec.instructions)) for _ in range(spec.assistants)]
    waiting: list[Talk] = []
    begun, started = 0.0, 0
    for number in range(requests):
        while not waiting or waiting[0].time > begun:
            begun -= math.log(1 - chance.share()) / spec.sessions_per_second
            system = chance.pick(systems, zipf(spec.assistants, 1.0))
            prompt = np.concatenate((system, tokens(chance.whole(spec.message))))
            heapq.heappush(waiting, Talk(begun, started, prompt, chance.whole(spec.turns)))
            started += 1
        talk = heapq.heappop(waiting)
        said, hidden = tokens(chance.whole(spec.output)), np.empty(0, np.int32)
        if chance.happens(spec.reasons):
            hidden = tokens(chance.whole(spec.reasoning))
            hidden[0] = THINK
        yield number, talk.number, talk.prompt, np.concatenate((talk.prompt, hidden, said))
        talk.prompt = np.concatenate((talk.prompt, said, tokens(chance.whole(spec.message))))
        talk.left -= 1
        talk.time += chance.of(spec.gap_s)
        if talk.left > 0:
            heapq.heappush(waiting, talk)


def over_a_store(requests: int, *, learns: bool) -> tuple[Books, set[int]]:
    """Serve conversations over a store, as an engine does."""
    books, last, now = Books(), dict[int, int](), [0]
    zeros = torch.zeros(1, 2, 1 << 16, 1, 4, dtype=torch.float16)
    with KVStore(GEOMETRY, model="m@1", tiers=["memory://2GiB"], block_tokens=BLOCK) as store:
        write, read = store._tiered.write, store._tiered.read

        def writing(blocks, sizes, *given, **more):  # type: ignore[no-untyped-def]
            written = write(blocks, sizes, *given, **more)
            kept = written.kept
            books.stored(now[0], [blocks[at] for at in kept], [sizes[at] for at in kept])
            return written

        def reading(blocks, *given, **more):  # type: ignore[no-untyped-def]
            count = read(blocks, *given, **more)
            books.read.update(blocks[:count])
            return count

        store._tiered.write, store._tiered.read = writing, reading  # type: ignore[method-assign,assignment]
        for number, talk, prompt, tokens in turns(requests):
            now[0], last[talk] = number, number
            hits = store.get(prompt[:-1])[1]
            books.asked += len(prompt)
            books.hits += hits
            start = hits // BLOCK * BLOCK
            store.put(prompt, zeros[:, :, start : len(prompt)], start, tail=True)
            start = len(prompt) // BLOCK * BLOCK
            kv = zeros[:, :, start : len(tokens)]
            answer = len(prompt) if learns else None
            store.put(tokens, kv, start, tail=True, answer=answer, ended=STOP)
            if learns:
                store.ended(tokens, prompt=len(prompt), ended=STOP)
    return books, set(last.values())


# --- a replay ------------------------------------------------------------------------------------


class Watched(TierSimulator):
    """Tiers that write down what is stored and read."""

    books = Books()

    def find(self, blocks: Sequence[bytes]) -> list[int]:
        found = super().find(blocks)
        self.books.read.update(blocks[: sum(found)])
        self.books.asked += len(blocks)
        self.books.hits += sum(found)
        return found

    def put(self, blocks: Sequence[bytes]) -> None:
        super().put(blocks)
        self.books.stored(self.books.asked, blocks, [1] * len(blocks))


def replayed(requests: int, *, learns: bool) -> tuple[Books, set[int]]:
    """Replay the generated trace through tiers that hold everything."""
    work = Workload.read(generate("reasoning", seed=1, requests=requests))
    books = Watched.books = Books()
    tiers = Watched([Level("memory", 1 << 30)], Inclusive())
    last: dict[int, int] = {}
    calls = tiered.Requests(work, tiers, whole_answers=not learns)
    for number in range(len(work)):
        found = calls.find(number)
        last[int(work.session[number])] = books.asked
        calls.keep(number, sum(found))
    return books, set(last.values())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    requests = 1000 if given.quick else 10_000
    figures = []
    for part, serve in (("a store", over_a_store), ("a replay", replayed)):
        whole, learned = (serve(requests, learns=learns) for learns in (False, True))
        for name, (books, last) in (("all answers", whole), ("what is read", learned)):
            goal = 1.1 if name == "what is read" else None
            figures += [
                Figure(f"stored / read, {name}", "", books.ratio(last), part=part, goal=goal,
                       better="less"),
                Figure(f"tokens found, {name}", "%", 100 * books.hits / books.asked, part=part),
            ]  # fmt: skip
    return show(
        figures, f"{requests:,} requests of conversations with reasoning", as_json=given.json
    )


if __name__ == "__main__":
    sys.exit(main())
