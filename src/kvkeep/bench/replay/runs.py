"""Many replays of one workload: in several processes, and with a log of finished replays."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.outcome import Outcome
from kvkeep.bench.replay.pace import check_loading
from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.replay.sharing import check_tenants, simulate_shares, simulate_tier_shares
from kvkeep.bench.replay.simulate import SESSIONS, simulate
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.core.errors import InvalidValue, did_you_mean, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction.shares import check_weights
from kvkeep.store.tiers import tiering
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost, TransferCost
    from kvkeep.core.groups import GroupLayout
    from kvkeep.store.backends import WriteBudget

__all__ = ["BOUNDS", "ReplayRun", "RunLog", "increments", "replay"]

BOUNDS = (BELADY, INFINITE)
"""Names of bounds, which can stand in the place of a policy."""

_CURVE_OF = "lru"
_SAMPLED_BLOCKS = 0.1  # share of the blocks that the what-if curve samples
_VERSION = 11  # of replays: outcomes in a log of another version are not reused


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay: a policy (or a bound) with a capacity.

    A policy is one of `kvkeep.core.eviction.POLICIES`, and with tiers also ``2q``, with or without
    ``+sessions``. ``below`` are the tokens of tiers below the first one of ``capacity_tokens``, and
    ``tiering`` the policy that moves blocks between them (`kvkeep.store.tiers.tiering`). With
    ``cost`` computing takes time, and ``users`` may send requests in turn, or sessions wait for
    their answers in a ``closed_loop`` (`simulate_loop`); tiers, the first included, then take time
    to read, by ``reads`` and ``loading`` (`simulate_tiers`). ``writes`` are write budgets of the
    tiers, in tokens. ``groups`` are those of a model with windows or states, with pages of their
    size. With ``shares``, pairs of a tenant and its weight, tenants share the memory and the tiers,
    and are compared with each alone (`simulate_shares`, `simulate_tier_shares`). Raises
    `InvalidValue` for invalid values.
    """

    policy: str
    capacity_tokens: int
    page_tokens: int | None = None
    prefix: str = "radix"
    below: tuple[int, ...] = ()
    tiering: str = "inclusive"
    cost: PrefillCost | None = None
    users: int | None = None
    closed_loop: bool = False
    reads: tuple[TransferCost | None, ...] = ()
    loading: str = "prefix"
    groups: GroupLayout | None = None
    shares: tuple[tuple[str, float], ...] = ()
    writes: tuple[WriteBudget | None, ...] = ()

    def __post_init__(self) -> None:
        policies = tier_policies() if self.below else POLICIES
        if self.eviction not in policies and self.policy not in BOUNDS:
            names = (*policies, *BOUNDS)
            raise InvalidValue(
                f"there is no eviction policy {self.policy!r}; there are {', '.join(names)}, and "
                f"policies with {SESSIONS} appended, which know the session of each request"
                f"{did_you_mean(self.eviction, names)}"
            )
        if self.policy != INFINITE:
            for capacity in (self.capacity_tokens, *self.below):
                whole("capacity", capacity, 1)
        if self.below and self.policy not in BOUNDS:
            self._check_tiers()
        if self.groups is not None:
            self._check_groups(self.groups)
        if self.shares:
            self._check_shares()
        if self.users is not None and self.cost is None:
            raise InvalidValue("users wait for answers: that needs the cost of prompts")
        if self.closed_loop and self.cost is None:
            raise InvalidValue("in a closed loop answers are waited for: that needs their cost")
        if self.closed_loop and self.users is not None:
            raise InvalidValue("sessions begin at their times or when users are free, not both")
        if self.reads and not (self.below and self.cost):
            raise InvalidValue(
                "the bandwidth of tiers needs tiers, as --capacity 1M+8M, and --cost"
            )
        check_loading(self.loading)

    def _check_tiers(self) -> None:
        tiering(self.tiering)
        for what, given in (
            ("sessions", self.policy.endswith(SESSIONS)),
            ("pages of tokens", self.page_tokens is not None),
            ("windows or states", self.groups is not None),
        ):
            if given:
                raise InvalidValue(f"tiers are replayed by blocks only, not with {what}")

    def _check_shares(self) -> None:
        check_weights(dict(self.shares))
        for what, given in (
            ("a bound", self.policy in BOUNDS),
            ("times of computing", self.cost is not None),
        ):
            if given:
                raise InvalidValue(f"tenants share the memory of a replay without {what}")

    def _check_groups(self, groups: GroupLayout) -> None:
        if self.policy in BOUNDS:
            raise InvalidValue(
                f"{self.policy} is a bound of models without windows and states, and so of all "
                "others with as many pages; leave groups out"
            )
        if self.page_tokens not in {None, groups.page_size}:
            raise InvalidValue(
                f"page_tokens is {self.page_tokens}; pages of these groups have {groups.page_size}"
            )

    @property
    def name(self) -> str:
        """The policy's name in the outcome."""
        if self.below and self.policy not in BOUNDS:
            return f"{self.policy}{'+shares' if self.shares else ''}/{self.tiering}"
        if self.shares:
            return f"{self.eviction}+shares{self.policy.removeprefix(self.eviction)}"
        return self.policy

    @property
    def total_tokens(self) -> int:
        """Tokens of all tiers."""
        return self.capacity_tokens + sum(self.below)

    @property
    def eviction(self) -> str:
        """The name of the eviction policy, without ``+sessions``."""
        return self.policy.removesuffix(SESSIONS)

    def check(self, workload: Workload) -> None:
        """Raise `InvalidValue` if the replay cannot run on ``workload``."""
        if self.policy != INFINITE:
            page = None if self.policy in BOUNDS else self.page_tokens
            for capacity in (self.capacity_tokens, *self.below):
                Paging(workload.unit_tokens, page, self.groups).pages(capacity)
        if self.shares:
            check_tenants(workload, dict(self.shares))
        named = self.policy.endswith(SESSIONS)
        if (named or self.closed_loop) and not (workload.session >= 0).any():
            what = self.policy if named else "a closed loop"
            raise InvalidValue(f"{what} needs sessions; {workload.name} has none")

    def on(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run the replay. Raises `InvalidValue` as `check` does."""
        if self.policy == INFINITE:
            return infinite(workload, progress)
        if self.policy == BELADY:
            return belady(workload, self.total_tokens, progress)
        if self.below:
            capacities = (self.capacity_tokens, *self.below)
            if self.shares:
                return simulate_tier_shares(
                    workload,
                    capacities,
                    self.tiering,
                    self.policy,
                    shares=dict(self.shares),
                    progress=progress,
                )
            return simulate_tiers(
                workload,
                capacities,
                self.tiering,
                self.policy,
                cost=self.cost,
                reads=self.reads,
                loading=self.loading,
                users=self.users,
                closed_loop=self.closed_loop,
                writes=self.writes,
                progress=progress,
            )
        if self.cost is not None:
            return simulate_loop(
                workload,
                self.capacity_tokens,
                self.eviction,
                cost=self.cost,
                users=self.users,
                closed_loop=self.closed_loop,
                sessions=self.policy.endswith(SESSIONS),
                page_tokens=self.page_tokens,
                prefix=self.prefix,
                groups=self.groups,
                progress=progress,
            )
        if self.shares:
            return simulate_shares(
                workload,
                self.capacity_tokens,
                self.eviction,
                shares=dict(self.shares),
                sessions=self.policy.endswith(SESSIONS),
                page_tokens=self.page_tokens,
                prefix=self.prefix,
                groups=self.groups,
                progress=progress,
            )
        return simulate(
            workload,
            self.capacity_tokens,
            self.eviction,
            # The curve is always of LRU, so one run that samples it is enough. It has no states.
            what_if=_SAMPLED_BLOCKS if self.policy == _CURVE_OF and self.groups is None else None,
            sessions=self.policy.endswith(SESSIONS),
            page_tokens=self.page_tokens,
            prefix=self.prefix,
            groups=self.groups,
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
    """Run replays and yield each with its outcome as soon as it is finished, in any order.

    ``jobs`` processes run at once, each with a copy of the workload. Outcomes in ``journal`` are
    reused, and new ones are added to it. ``progress`` is called with the number of further requests
    replayed. Raises `InvalidValue` before anything runs.
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
    if jobs == 1 or len(left) < 2:
        outcomes = _in_turn(workload, left, progress)
    else:
        outcomes = _in_processes(workload, left, min(jobs, len(left)), progress)
    for run, outcome in outcomes:
        if journal is not None:
            journal.add(workload, run, outcome)
        yield run, outcome


class RunLog:
    """A log of finished replays, one per line of a file, so that none is run twice.

    Lines that are truncated, foreign or of another version are skipped. Not thread-safe.
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
        """Return the outcome of ``run``, or None if the log has none."""
        return self._known.get(_key(workload, run))

    def add(self, workload: Workload, run: ReplayRun, outcome: Outcome) -> None:
        """Append an outcome. Raises `InvalidValue` if the file cannot be written."""
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


# --- in turn, or in several processes -------------------------------------------------------------


def _in_turn(
    workload: Workload, runs: Iterable[ReplayRun], progress: Callable[[int], object] | None
) -> Iterator[tuple[ReplayRun, Outcome]]:
    for run in runs:
        with increments(progress, len(workload)) as told:
            outcome = run.on(workload, told)
        yield run, outcome


@contextmanager
def increments(
    progress: Callable[[int], object] | None, total: int | None = None
) -> Iterator[Callable[[int], None] | None]:
    """Yield a callback that takes totals and calls ``progress`` with increments.

    At the end it reports the rest of ``total``.
    """
    if progress is None:
        yield None
        return
    told = 0

    def more(number: int) -> None:
        nonlocal told
        progress(number - told)
        told = number

    yield more
    if total is not None:
        more(total)


class _Worker:
    """State of a worker process: the workload, and a shared counter of replayed requests."""

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

        with increments(told, len(cls.workload)) as progress:
            return run.on(cls.workload, progress)


def _in_processes(
    workload: Workload,
    runs: Sequence[ReplayRun],
    jobs: int,
    progress: Callable[[int], object] | None,
) -> Iterator[tuple[ReplayRun, Outcome]]:
    # Spawned, not forked: a forked process lacks the caller's threads, but has their locks held.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    told = 0
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_Worker.begin, initargs=(workload, done)
    ) as pool:
        with _interrupts_held():
            futures = {pool.submit(_Worker.run, run): run for run in runs}
            workers = set(multiprocessing.active_children()) - others
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
            for worker in workers:  # which may not even have begun
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C for the processes that begin within, for good, and for this one meanwhile.

    A terminal sends it to all of them, and a process that still imports would print a traceback.
    """
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this process when its parent has died; an orphan would compute on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _next(futures: Iterable[Any], seconds: float | None) -> Any:
    try:
        return next(as_completed(futures, timeout=seconds))
    except TimeoutError:
        return None
