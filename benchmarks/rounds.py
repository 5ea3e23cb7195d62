"""Contenders by turns over the same work, and the resulting rows of a table."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from contenders import VOCABULARY, Ours, Work, load_plain, save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from contenders import Answers, Contender, Tokens

__all__ = ["Bench", "Row", "alone", "random_tokens", "ratios"]

Result = TypeVar("Result")


def alone(function: Callable[..., Result], *args: object) -> Result:
    """``function(*args)`` in a thread of its own, with OpenMP threads that end with it.

    ``generate_batch`` computes in a thread that it starts, and every thread that computes has a
    pool of OpenMP threads. While there are more of those than cores, they sleep where they would
    spin, and whoever computes is slower: our engine by a fifth. So there is one at a time.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: values of all rounds, in one unit.

    ``ratios`` say for each round how many times faster the first row of the case is than this one.
    ``goal`` is for their median, or without ratios for that of the values, and what is
    ``better``, more or less, says which side of it is good.
    """

    case: str
    name: str
    unit: str
    values: tuple[float, ...]
    ratios: tuple[float, ...] = ()
    goal: float | None = None
    better: Literal["more", "less"] = "more"
    note: str = ""

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        """The median of the ratios."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached, if there is one."""
        if self.goal is None:
            return None
        figure = self.median if self.ratio is None else self.ratio
        return figure >= self.goal if self.better == "more" else figure <= self.goal

    def as_dict(self) -> dict[str, object]:
        """Return the row with derived values."""
        return {**asdict(self), "median": self.median, "ratio": self.ratio, "met": self.met}


class Bench:
    """The model in all contenders, and the rows so far.

    ``scale`` below 1 makes prompts and answers shorter, for a quick look.
    """

    def __init__(self, folder: Path, *, seed: int, scale: float, rounds: int) -> None:
        self.parameters = save_model(folder, seed)
        self.ours = Ours(folder)
        self.plain = load_plain(folder)
        self.scale = scale
        self.rounds = rounds
        self.rows: list[Row] = []
        self._seed = seed

    def rng(self) -> np.random.Generator:
        """Return a generator that is the same for a case in every selection of cases."""
        return np.random.default_rng(self._seed)

    def scaled(self, tokens: int) -> int:
        """Return ``tokens``, or fewer with ``--quick``."""
        return max(1, int(tokens * self.scale))

    def compare(
        self,
        case: str,
        make: Callable[[np.random.Generator], Work],
        others: Sequence[Contender],
        *,
        goal: float,
        judged: Contender | None = None,
    ) -> None:
        """Let ours and ``others`` do the same work, by turns.

        The ``goal`` is against ``judged``; None: against whoever is best of the others.
        """
        contenders: list[Contender] = [self.ours, *others]
        rng = self.rng()
        rates: list[list[float]] = [[] for _ in contenders]
        alike: list[list[bool]] = [[] for _ in contenders]
        for _ in range(self.rounds):
            work = make(rng)
            first: Answers = []
            for contender, rate, same in zip(contenders, rates, alike, strict=True):
                seconds, answers = alone(_turn, contender, work)
                rate.append(work.tokens / seconds)
                assert [len(answer) for answer in answers] == work.outputs, contender.name
                first = first or answers
                same += [a == b for a, b in zip(answers, first, strict=True)]
        best = judged or max(zip(rates[1:], others, strict=True), key=_by_median)[1]
        self.rows.append(Row(case, self.ours.name, "tokens/s", tuple(rates[0])))
        for other, rate, same in zip(others, rates[1:], alike[1:], strict=True):
            self.rows.append(
                Row(
                    case,
                    other.name,
                    "tokens/s",
                    tuple(rate),
                    ratios(rates[0], rate),
                    goal=goal if other is best else None,
                    note=f"{sum(same)} of {len(same)} answers equal",
                )
            )


def _turn(contender: Contender, work: Work) -> tuple[float, Answers]:
    """Warm up, run, and rest; return the seconds of the run."""
    prompt = np.arange(1, 33, dtype=np.int32)
    beginnings = [prompt[:length] for length in (32, 28, 24, 20)]
    try:
        contender.run(Work(beginnings, [4] * len(beginnings), prefix=16))
        start = perf_counter()
        answers = contender.run(work)
        return perf_counter() - start, answers
    finally:
        contender.rest()


def random_tokens(rng: np.random.Generator, length: int) -> Tokens:
    """Return a prompt of random tokens."""
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios round by round."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


def _by_median(pair: tuple[list[float], Contender]) -> float:
    return statistics.median(pair[0])
