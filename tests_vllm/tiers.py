"""Engines with several secondary tiers side by side, and what faults do to them.

One engine writes to vLLM's own tier and to kvkeep's. A request loads from one of them, which it
selects by the locality that the tier is configured with. What is seen is held against the table in
``docs/explanation/offloading-faults.md``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import apart, engine
from tiered import TieredEngine, buffered, kvkeep_tier, offloading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engines import Answer

    from kvkeep.integrations.vllm.tier import KVKeepTier

FS, OBJ, OURS = "`fs`", "`obj`", "`KVKeepTier`"
PAGE = Path(__file__).parent.parent / "docs/explanation/offloading-faults.md"
_CELL = re.compile(r"(?P<seen>[^`]+) · `(?P<test>test_\w+)`")


def table() -> dict[tuple[str, str], tuple[str, str]]:
    """What the page says: ``(fault, system)`` to what is seen, and the test that sees it."""
    cells = {}
    systems: list[str] = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            systems = []
            continue
        first, *row = [cell.strip() for cell in line.strip("|").split("|")]
        if FS in row:
            systems = row
        elif systems and not first.startswith("--"):
            for system, cell in zip(systems, row, strict=True):
                found = _CELL.fullmatch(cell)
                assert found or cell == "–", f"{first}, {system}: {cell!r}"
                if found:
                    cells[first, system] = found["seen"], found["test"]
    return cells


def seen(fault: str, system: str, what: str) -> None:
    """Hold what this test has seen against the page."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition("[")[0].split(" ")[0]
    expected = table().get((fault, system))
    assert expected == (what, test), f"{PAGE.name} has {expected} for {fault}, {system}"


def outcome(cold: Sequence[Answer], warm: Sequence[Answer]) -> str:
    """``right tokens``, or ``wrong tokens`` if an answer is another."""
    wrong = [at for at, (a, b) in enumerate(zip(cold, warm, strict=True)) if a.differs(b) > 1e-3]
    return "wrong tokens" if wrong else "right tokens"


def cached(answers: Sequence[Answer]) -> int:
    return sum(answer.cached for answer in answers)


class SideBySide(TieredEngine):
    """An engine that writes to several secondary tiers, and loads from the one that a test names.

    The first tier is vLLM's, the second kvkeep's.
    """

    @property
    def tiers(self) -> list[Any]:
        return list(self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers)

    @property
    def tier(self) -> KVKeepTier:
        return self.tiers[-1]  # type: ignore[no-any-return]

    def forget_all(self) -> None:
        """As `TieredEngine.forget_all`; steps until the copies of earlier requests have ended."""
        until = time.monotonic() + 60
        while not self.core.scheduler.reset_prefix_cache(reset_connector=True):
            self.core.step()
            assert time.monotonic() < until, "blocks are in use for ever"

    def load(self, system: str, prompts: Sequence[list[int]]) -> list[Answer]:
        """Ask with an empty memory: what is found, ``system`` has; ``cold``: nothing is."""
        self.forget_all()
        return self.ask(prompts, extra_args=loading(system))

    def written(self) -> None:
        """Wait until all tiers have written what they were given, or have given up."""
        until = time.monotonic() + 60
        while any(tier.has_pending_work() for tier in self.tiers) and time.monotonic() < until:
            self.core.step()
        for tier in self.tiers:
            tier.drain_jobs()
        self.store.flush(60)

    def forget_buffer(self) -> None:
        """Fill the memory of kvkeep's store: what vLLM asks for is in the tiers below it alone."""
        store = self.store
        capacity = store.stats()[0].capacity
        assert capacity is not None
        others = [os.urandom(32) for _ in range(capacity >> 16)]
        store.put(others, [bytes(1 << 16)] * len(others))
        store.flush(60)
        store.remove(others)

    def answered(
        self, system: str, prompt: list[int], seconds: float, then: Callable[[], object]
    ) -> bool:
        """Return whether a request is answered within ``seconds``; then call ``then``, and end it.

        It is answered in the end, however long that takes.
        """
        from vllm import SamplingParams

        self.forget_all()
        running = self.llm.llm_engine
        sampling = SamplingParams(max_tokens=4, temperature=0.0, extra_args=loading(system))
        running.add_request("waits", {"prompt_token_ids": prompt}, sampling)
        began, ended = time.monotonic(), False
        while not ended and time.monotonic() - began < seconds:
            ended = any(output.finished for output in running.step())
        then()
        until = time.monotonic() + 600
        while running.has_unfinished_requests():
            running.step()
            assert time.monotonic() < until, "it hangs for ever"
        return ended


def loading(system: str) -> dict[str, Any]:
    """The parameters of a request that loads from one system."""
    where = {FS: [{"locality": "LOCAL"}], OBJ: [{"locality": "LOCAL"}],
             OURS: [{"locality": "REMOTE"}], "cold": []}[system]  # fmt: skip
    return {"kv_transfer_params": {"kv_load_tiers": where}}


def engines_apart(call: str, *args: str) -> dict[str, Any]:
    """What ``module:function`` in a process of its own returns, for these arguments."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        apart("tiers:told", call, file.name, *args)
        return json.load(file)  # type: ignore[no-any-return]


def told(call: str, file: str, *args: str) -> None:
    module, _, function = call.partition(":")
    found = getattr(importlib.import_module(module), function)(*args)
    Path(file).write_text(json.dumps(found))


def fs_tier(root: Path | str) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), "locality": "LOCAL"}


@contextmanager
def side_by_side(
    model: str, theirs: Sequence[dict[str, Any]], ours: Sequence[str], **more: Any
) -> Iterator[SideBySide]:
    """An engine with tiers of vLLM and, below its own memory, kvkeep's ``ours``.

    Rows have the layout that vLLM's own spec gives them.
    """
    options, extra = dict(more.pop("options", {})), {"canonical_layout": False}
    extra |= more.pop("extra", {})
    buffer = options.pop("buffer", None)
    mine = kvkeep_tier(*ours, locality="REMOTE", **options)
    transfer = offloading([*theirs, mine], **extra)
    with buffered(buffer), engine(model, kv_transfer_config=transfer, **more) as plain:
        plain.__class__ = SideBySide
        assert isinstance(plain, SideBySide)
        yield plain


def blocks_of_fs(root: Path) -> list[Path]:
    """The files of vLLM's tier, in no order of meaning."""
    return sorted(root.rglob("*.bin"))


def flip(file: Path) -> None:
    """Flip one bit, of a number's exponent: it is 256 times as large, or as small."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 | 3] ^= 0x04
    file.write_bytes(raw)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def blank(file: Path) -> None:
    """Zeros in the second half: what a write without fsync leaves when power is lost."""
    size = file.stat().st_size
    os.truncate(file, size // 2)
    os.truncate(file, size)
