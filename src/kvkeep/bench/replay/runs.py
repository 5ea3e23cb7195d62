"""Many replays of one workload: several at once, and those that were done before not again."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.outcome import Outcome
from kvkeep.bench.replay.simulate import SESSIONS, Paging, simulate
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.store.tiers import tiering

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvkeep.bench.replay.costs import PrefillCost
    from kvkeep.bench.replay.workload import Workload

__all__ = ["BOUNDS", "ReplayRun", "RunLog", "replay"]

BOUNDS = (BELADY, INFINITE)
"""Names that stand in the place of a policy, for what no policy can exceed."""

_CURVE_OF = "lru"
_WATCHED = 0.1  # of the blocks
_VERSION = 4  # of what replays find: what an older one found is not taken over


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay: a policy (or a bound) with a capacity.

    A policy is one of `kvkeep.core.eviction.POLICIES`, or one of them and ``+sessions``. With
    ``below`` there are tiers of so many tokens below the first of ``capacity_tokens``, and
    ``tiering`` says what moves where (`kvkeep.store.tiers.tiering`). With ``cost`` the replay
    takes its time, and ``users`` may ask one after the other (`simulate_loop`); tiers then read at
    ``bandwidths``, the first one's too (`simulate_tiers`). Raises `InvalidValue` for what is none.
    """

    policy: str
    capacity_tokens: int
    page_tokens: int | None = None
    prefix: str = "radix"
    below: tuple[int, ...] = ()
    tiering: str = "inclusive"
    cost: PrefillCost | None = None
    users: int | None = None
    bandwidths: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if self.eviction not in POLICIES and self.policy not in BOUNDS:
            known = ", ".join((*POLICIES, *BOUNDS))
            raise InvalidValue(
                f"there is no eviction policy {self.policy!r}; there are {known}, and with "
                f"{SESSIONS} behind it a policy is told of sessions"
            )
        if self.policy != INFINITE:
            for capacity in (self.capacity_tokens, *self.below):
                whole("capacity", capacity, 1)
        if self.below and self.policy not in BOUNDS:
            self._check_tiers()
        if self.users is not None and self.cost is None:
            raise InvalidValue("users wait for answers: what prompts cost has to be known")
        if self.bandwidths and not (self.below and self.cost):
            raise InvalidValue("bandwidths are of tiers, where prompts cost something")
        for speed in self.bandwidths:
            if speed is not None and not 0 < speed < math.inf:
                raise InvalidValue(f"a tier reads some bytes a second, got {speed}")

    def _check_tiers(self) -> None:
        tiering(self.tiering)
        for what, given in (
            ("sessions", self.policy.endswith(SESSIONS)),
            ("pages by tokens", self.page_tokens is not None),
        ):
            if given:
                raise InvalidValue(f"tiers are replayed by blocks alone: not with {what}")

    @property
    def name(self) -> str:
        """What its outcome's policy is called."""
        if self.below and self.policy not in BOUNDS:
            return f"{self.policy}/{self.tiering}"
        return self.policy

    @property
    def total_tokens(self) -> int:
        """Of all tiers."""
        return self.capacity_tokens + sum(self.below)

    @property
    def eviction(self) -> str:
        """The name of the policy alone."""
        return self.policy.removesuffix(SESSIONS)

    def check(self, workload: Workload) -> None:
        """Raise `InvalidValue` if it cannot be run on ``workload``."""
        if self.policy != INFINITE:
            page = None if self.policy in BOUNDS else self.page_tokens
            for capacity in (self.capacity_tokens, *self.below):
                Paging(workload.unit_tokens, page).pages(capacity)
        if self.policy.endswith(SESSIONS) and not (workload.session >= 0).any():
            raise InvalidValue(f"{self.policy} needs sessions; {workload.name} knows of none")

    def on(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Outcome:
        """Do it. Raises `InvalidValue` as `check` does."""
        if self.policy == INFINITE:
            return infinite(workload, progress)
        if self.policy == BELADY:
            return belady(workload, self.total_tokens, progress)
        if self.below:
            capacities = (self.capacity_tokens, *self.below)
            return simulate_tiers(
                workload,
                capacities,
                self.tiering,
                self.policy,
                cost=self.cost,
                bandwidths=self.bandwidths,
                users=self.users,
                progress=progress,
            )
        if self.cost is not None:
            return simulate_loop(
                workload,
                self.capacity_tokens,
                self.eviction,
                cost=self.cost,
                users=self.users,
                sessions=self.policy.endswith(SESSIONS),
                page_tokens=self.page_tokens,
                prefix=self.prefix,
                progress=progress,
            )
        return simulate(
            workload,
            self.capacity_tokens,
            self.eviction,
            # One is enough: the curve is of LRU, whatever the policy.
            what_if=_WATCHED if self.policy == _CURVE_OF else None,
            sessions=self.policy.endswith(SESSIONS),
            page_tokens=self.page_tokens,
            prefix=self.prefix,
            progress=progress,
        )


def replay(
    workload: Workload,
    runs: Sequence[ReplayRun],
    *,
    jobs: int = 1,
    journal: RunLog | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[tuple[ReplayRun, Outcome]]:
    """``runs`` and their outcomes, each as soon as it is there, in any order.

    ``jobs`` processes work at once, each with a copy of the workload. What ``journal`` has is not
    done again, and it is given what is. ``progress`` is told how many more requests were replayed.
    Raises `InvalidValue` before anything runs.
    """
    whole("jobs", jobs, 1)
    for run in runs:
        run.check(workload)
    left = []
    for run in runs:
        known = journal.find(workload, run) if journal is not None else None
        if known is None:
            left.append(run)
        else:
            if progress is not None:
                progress(len(workload))
            yield run, known
    together = _here if jobs == 1 or len(left) < 2 else _in_processes
    for run, outcome in together(workload, left, min(jobs, len(left)), progress):
        if journal is not None:
            journal.add(workload, run, outcome)
        yield run, outcome


class RunLog:
    """A file with a line for each replay that was done, so that it need not be done again.

    Lines that are torn, foreign or of another version are passed over. Thread safety: none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Outcome] = {}
        self._torn = False
        if path.exists():
            written = path.read_bytes()
            self._torn = bool(written) and not written.endswith(b"\n")
            for line in written.splitlines():
                found = _line(line)
                if found is not None:
                    self._known[found[0]] = found[1]

    def find(self, workload: Workload, run: ReplayRun) -> Outcome | None:
        """What it came to, if it was done."""
        return self._known.get(_key(workload, run))

    def add(self, workload: Workload, run: ReplayRun, outcome: Outcome) -> None:
        """Keep what it came to. Raises `InvalidValue` where nothing can be written."""
        key = _key(workload, run)
        self._known[key] = outcome
        line = json.dumps({"run": key, "outcome": outcome.as_dict()}) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._torn + line)
        except OSError as error:
            raise InvalidValue(f"cannot write {self.path}: {error.strerror}") from error
        self._torn = False


def _key(workload: Workload, run: ReplayRun) -> str:
    settings = json.dumps(asdict(run), sort_keys=True)
    return f"{_VERSION} {workload.digest} {settings}"


def _line(line: bytes) -> tuple[str, Outcome] | None:
    try:
        found = json.loads(line)
        return str(found["run"]), Outcome.of(found["outcome"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


# --- one after the other, or several processes ---------------------------------------------------


def _here(
    workload: Workload,
    runs: Iterable[ReplayRun],
    jobs: int,
    progress: Callable[[int], object] | None,
) -> Iterator[tuple[ReplayRun, Outcome]]:
    del jobs
    for run in runs:
        with _differences(progress, len(workload)) as told:
            outcome = run.on(workload, told)
        yield run, outcome


@contextmanager
def _differences(
    progress: Callable[[int], object] | None, total: int
) -> Iterator[Callable[[int], None] | None]:
    """Makes of totals what came since; at the end all of them have come."""
    if progress is None:
        yield None
        return
    told = 0

    def more(number: int) -> None:
        nonlocal told
        progress(number - told)
        told = number

    yield more
    more(total)


class _Worker:
    """What a process has: the workload, and where it says how far it is."""

    workload: Workload
    done: Any

    @classmethod
    def begin(cls, workload: Workload, done: Any) -> None:
        cls.workload, cls.done = workload, done
        Thread(target=_end_with_parent, daemon=True).start()

    @classmethod
    def run(cls, run: ReplayRun) -> Outcome:
        def told(more: int) -> None:
            with cls.done.get_lock():
                cls.done.value += more

        with _differences(told, len(cls.workload)) as progress:
            return run.on(cls.workload, progress)


def _in_processes(
    workload: Workload,
    runs: Sequence[ReplayRun],
    jobs: int,
    progress: Callable[[int], object] | None,
) -> Iterator[tuple[ReplayRun, Outcome]]:
    # Not forked: threads of whoever calls would be missing there, with their locks held.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    told = 0
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_Worker.begin, initargs=(workload, done)
    ) as pool:
        futures = {pool.submit(_Worker.run, run): run for run in runs}
        try:
            while futures:
                with_next = _next(futures, 0.2 if progress is not None else None)
                if progress is not None:
                    now = done.value
                    progress(now - told)
                    told = now
                if with_next is not None:
                    yield futures.pop(with_next), with_next.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """Who was killed gives no more work, and nobody else would end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _next(futures: Iterable[Any], seconds: float | None) -> Any:
    try:
        return next(as_completed(futures, timeout=seconds))
    except TimeoutError:
        return None
