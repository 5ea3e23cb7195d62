"""Many replays of one workload, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.bounds import BELADY, INFINITE, belady, infinite
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.replay.simulate import simulate
from kvkeep.bench.replay.tiered import simulate_tiers
from kvkeep.core.errors import InvalidValue, did_you_mean, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction.shares import check_weights
from kvkeep.store.tiers import tiering
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost, TransferCost
    from kvkeep.core.groups import GroupLayout

__all__ = ["BOUNDS", "ReplayRun", "increments", "replay"]

BOUNDS = (BELADY, INFINITE)
"""Names of bounds, which can stand in the place of a policy."""


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay: a policy (or a bound) with a capacity.

    A policy is one of `kvkeep.core.eviction.POLICIES`, with tiers also ``2q``. ``below`` are the
    tokens of tiers below the first one of ``capacity_tokens``, and ``tiering`` the policy that
    moves blocks between them (`kvkeep.store.tiers.tiering`). With ``cost`` computing takes time,
    and ``users`` may send requests in turn (`simulate_loop`); tiers, the first included, then take
    time to read, by ``reads`` (`simulate_tiers`). ``groups`` are those of a model with windows or
    states, with pages of their size. With ``shares``, pairs of a tenant and its weight, tenants
    share the memory and the tiers. Raises `InvalidValue` for invalid values.
    """

    policy: str
    capacity_tokens: int
    page_tokens: int | None = None
    below: tuple[int, ...] = ()
    tiering: str = "inclusive"
    cost: PrefillCost | None = None
    users: int | None = None
    reads: tuple[TransferCost | None, ...] = ()
    groups: GroupLayout | None = None
    shares: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        policies = tier_policies() if self.below else POLICIES
        if self.policy not in policies and self.policy not in BOUNDS:
            names = (*policies, *BOUNDS)
            raise InvalidValue(
                f"there is no eviction policy {self.policy!r}; there are {', '.join(names)}"
                f"{did_you_mean(self.policy, names)}"
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
        if self.reads and not (self.below and self.cost):
            raise InvalidValue("the time to read tiers needs tiers, and the cost of prompts")

    def _check_tiers(self) -> None:
        tiering(self.tiering)
        for what, given in (
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
            return f"{self.policy}+shares"
        return self.policy

    @property
    def total_tokens(self) -> int:
        """Tokens of all tiers."""
        return self.capacity_tokens + sum(self.below)

    def check(self, workload: Workload) -> None:
        """Raise `InvalidValue` if the replay cannot run on ``workload``."""
        if self.policy != INFINITE:
            page = None if self.policy in BOUNDS else self.page_tokens
            for capacity in (self.capacity_tokens, *self.below):
                Paging(workload.unit_tokens, page, self.groups).pages(capacity)
        if self.shares:
            _check_tenants(workload, dict(self.shares))

    def on(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run the replay. Raises `InvalidValue` as `check` does."""
        if self.policy == INFINITE:
            return infinite(workload, progress)
        if self.policy == BELADY:
            return belady(workload, self.total_tokens, progress)
        shares = dict(self.shares) or None
        if self.below:
            return simulate_tiers(
                workload,
                (self.capacity_tokens, *self.below),
                self.tiering,
                self.policy,
                cost=self.cost,
                reads=self.reads,
                users=self.users,
                shares=shares,
                progress=progress,
            )
        if self.cost is not None:
            return simulate_loop(
                workload,
                self.capacity_tokens,
                self.policy,
                cost=self.cost,
                users=self.users,
                groups=self.groups,
                progress=progress,
            )
        return simulate(
            workload,
            self.capacity_tokens,
            self.policy,
            page_tokens=self.page_tokens,
            groups=self.groups,
            shares=shares,
            progress=progress,
        )


def _check_tenants(workload: Workload, shares: dict[str, float]) -> None:
    """Raise `InvalidValue` for a tenant that the workload does not have; the unnamed one passes."""
    for tenant in check_weights(shares):
        if tenant and tenant not in workload.namespaces:
            some = ", ".join(map(repr, workload.namespaces[:3]))
            raise InvalidValue(
                f"there is a share for {tenant!r}, but {workload.name} has no such tenant; it has "
                f"{len(workload.namespaces)}: {some}{' …' * (len(workload.namespaces) > 3)}"
            )


def replay(
    workload: Workload,
    runs: Sequence[ReplayRun],
    *,
    jobs: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Iterator[tuple[ReplayRun, Outcome]]:
    """Replay runs and yield each with its outcome as soon as it is finished, in any order.

    ``jobs`` processes run at once, each with a copy of the workload. ``progress`` is called with
    the number of further requests replayed. Raises `InvalidValue` before anything runs.
    """
    whole("jobs", jobs, 1)
    for run in runs:
        run.check(workload)
    if jobs == 1 or len(runs) < 2:
        yield from _in_turn(workload, runs, progress)
    else:
        yield from _in_processes(workload, runs, min(jobs, len(runs)), progress)


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
