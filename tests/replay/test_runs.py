"""Several replays at once, and refused ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from replaying import workload

from kvkeep.bench.replay import BELADY, INFINITE, ReplayRun, replay
from kvkeep.cli import main
from kvkeep.core.errors import InvalidValue

PATHS = ["abc", "abd", "xyz", "abc", "abd", "uvw", "xyz", "abc"]


def figures(outcomes):
    return sorted((one.policy, one.capacity_tokens, one.hit_blocks) for _, one in outcomes)


@pytest.fixture
def runs() -> list[ReplayRun]:
    return [
        ReplayRun(policy, size) for policy in ("lru", "returns", BELADY) for size in (16, 24)
    ] + [ReplayRun(INFINITE, 0)]


def test_two_processes_find_what_one_does(runs):
    work, told = workload(PATHS), []
    one = figures(replay(work, runs))
    two = figures(replay(work, runs, jobs=2, progress=told.append))
    assert one == two
    assert len(one) == 7
    assert sum(told) <= len(runs) * len(work)


def test_progress_is_told_to_the_end(runs):
    work, told = workload(PATHS), []
    list(replay(work, runs, progress=told.append))
    assert sum(told) == len(runs) * len(work)


def test_nothing_runs_if_one_cannot():
    work = workload(PATHS)
    with pytest.raises(InvalidValue, match="less than a page of 4"):
        next(replay(work, [ReplayRun("lru", 16), ReplayRun("lru", 3)]))
    with pytest.raises(InvalidValue, match="jobs"):
        next(replay(work, [ReplayRun("lru", 16)], jobs=0))


def test_a_fault_in_a_process_is_told(runs):
    class Broken(ReplayRun):
        __slots__ = ()

        def on(self, workload, progress=None):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(replay(workload(PATHS), [Broken("lru", 16)]))


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from replaying import workload
from kvkeep.bench.replay import ReplayRun, replay

if __name__ == "__main__":
    runs = [ReplayRun("lru", 16), ReplayRun("returns", 16)]
    for _ in replay(workload(["abc"] * 50), runs, jobs=2):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="a signal that nobody can catch")
def test_processes_end_with_who_was_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    words = [sys.executable, str(script), str(Path(__file__).parent)]
    # Each process has our pipe as its output: it is at its end when the last one has gone.
    ended = subprocess.run(words, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc to see processes in")
@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "one-process"])
def test_an_interrupt_while_processes_begin_is_no_traceback(tmp_path, to_all):
    trace = tmp_path / "trace.jsonl"
    assert main(["trace", "generate", "chat", "--requests", "300", "--out", str(trace)]) == 0
    words = ["replay", str(trace), "--capacity", "10k,20k,40k,80k", "--jobs", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvkeep", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 3:  # two workers, and Python's own for semaphores
            assert process.poll() is None
            time.sleep(0.01)
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
