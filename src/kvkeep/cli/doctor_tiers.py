"""Checks of ``kvkeep doctor`` on tiers: access, space, and speed."""

from __future__ import annotations

import math
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvkeep.cli.arguments import model_geometry
from kvkeep.cli.doctor_places import opened_place
from kvkeep.cli.doctor_probe import TierProbe
from kvkeep.cli.doctor_results import fail, ok, warn
from kvkeep.cli.doctor_space import space_results
from kvkeep.core.errors import KVKeepError, reason
from kvkeep.core.geometry.units import format_bytes
from kvkeep.store.backends import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.cli.doctor_config import AskedTiers
    from kvkeep.cli.doctor_places import OpenPlace
    from kvkeep.cli.doctor_probe import TierSpeed
    from kvkeep.cli.doctor_results import CheckResult

__all__ = ["KVSize", "tier_results"]

_LLAMA_8B: Final = 128 << 10  # bytes of a token of Llama 3.1 8B in bfloat16
_PROMPT: Final = 8192  # tokens
_LONGEST: Final = 500  # characters of what a place says
_PATIENCE_S: Final = 30.0  # for a place that hangs, beside the time to measure


@dataclass(frozen=True)
class KVSize:
    """What the KV of a model takes: bytes of a token, in one rank, and of a record."""

    model: str
    token: int
    record: int

    @classmethod
    def of(cls, model: Path | None, dtype: str | None, *, tp: int, block_tokens: int) -> KVSize:
        """Return the sizes of the model in ``model``; None: of Llama 3.1 8B.

        Raises:
            InvalidValue: there is no model, or ``tp`` cannot divide it.
        """
        if model is None:
            token = _LLAMA_8B // tp
            return cls("Llama 3.1 8B", token, max(4096, token * block_tokens))
        geometry = model_geometry(model, dtype=dtype, tp=tp)
        token = geometry.bytes_per_token
        record = token * block_tokens or geometry.bytes_per_state
        return cls(model.resolve().name, token, max(4096, record))


def tier_results(asked: AskedTiers, size: KVSize, seconds: float) -> Iterator[CheckResult]:
    """Yield results on each tier; ``seconds`` are for the speed of each, 0: not measured.

    A place that hangs is left to its thread, which ends with the process.
    """
    claimed: dict[int, int] = {}  # by filesystem, what tiers before may still write there
    for place in asked.tiers:
        name = TierURL(place).safe
        results = _results(place, asked, size, seconds, claimed)
        found = _in_thread(results, timeout=_PATIENCE_S + seconds)
        try:
            yield from found
        except TimeoutError:
            said = f"no answer in {_PATIENCE_S + seconds:g} s"
            yield fail("access", name, said, "see whether its disk or server hangs")


def _in_thread(results: Iterator[CheckResult], *, timeout: float) -> Iterator[CheckResult]:
    """Yield ``results``, which a thread makes; pass its exception on.

    Raises:
        TimeoutError: the next one took longer than ``timeout`` seconds.
    """
    found: queue.SimpleQueue[CheckResult | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for result in results:
                found.put(result)
            found.put(None)
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            found.put(error)

    threading.Thread(target=work, name="kvkeep doctor", daemon=True).start()
    while True:
        try:
            result = found.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if result is None:
            return
        if isinstance(result, BaseException):
            raise result
        yield result


def _results(
    place: str, asked: AskedTiers, size: KVSize, seconds: float, claimed: dict[int, int]
) -> Iterator[CheckResult]:
    name = TierURL(place).safe
    try:
        with opened_place(place) as opened:
            if opened.backend is not None:
                probe = TierProbe(opened.backend, size.record)
                try:
                    yield from _access(probe, opened)
                    yield from space_results(opened, size.record, claimed)
                    if seconds:
                        speed = probe.speed(seconds)
                        yield _speed(name, speed, size, asked.load_timeout)
                finally:
                    with suppress(KVKeepError, OSError):
                        probe.clean()
                    opened.forget(probe.space)
            else:
                yield ok("access", name, opened.note)
                yield from space_results(opened, size.record, claimed)
    except (KVKeepError, OSError) as error:
        yield fail("access", name, reason(error)[:_LONGEST], _remedy(str(error)))


def _access(probe: TierProbe, opened: OpenPlace) -> Iterator[CheckResult]:
    wrong = probe.access()
    if wrong:
        yield fail("access", opened.name, wrong, "something else deletes, changes or caches there; "
                   "find out what")  # fmt: skip
    else:
        yield ok("access", opened.name, f"a record was written, read and deleted{opened.note}")


def _speed(name: str, speed: TierSpeed, size: KVSize, load_timeout: float) -> CheckResult:
    prompt = _PROMPT * size.token
    needed = prompt / speed.read if speed.read else math.inf
    said = (
        f"reads {_per_s(speed.read)}, writes {_per_s(speed.written)}, in records of "
        f"{format_bytes(speed.record_bytes)}; a prompt of {_PROMPT:,} tokens of {size.model} is "
        f"{format_bytes(prompt)} and loads in {needed:.3g} s"
    )
    if needed > load_timeout:
        said += f", longer than load_timeout ({load_timeout:g} s)"
        return warn("speed", name, said, "take a faster tier, or larger blocks: what is late is "
                    "computed")  # fmt: skip
    return ok("speed", name, said)


def _per_s(rate: float) -> str:
    return f"{format_bytes(int(rate))}/s"


_REMEDIES: Final = {
    "NOAUTH": "give its password, as valkey://:…@host or password_file=",
    "WRONGPASS": "correct the name or the password",
    "NOPERM": "allow this user ~PREFIX:* with +@read +@write +@connection",
    "READONLY": "name the primary: this is a replica",
    "MISCONF": "the server cannot write its snapshot; make room on its disk",
    "OOM": "set maxmemory-policy allkeys-lru, or give it more memory",
    "refused": "start the server, or correct host and port",
    "cannot be found": "correct the name of the host",
    "privileges": "allow this identity to get, put, list and delete objects there",
    "put: Object at location": "create the bucket, or correct its name",
    "169.254.169.254": "give credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "Permission denied": "give the directory to the user of the engine, with mode 0700",
    "Read-only": "mount it writable",
    "No space": "make room, or give a smaller size=",
    "has no room for": "make room on its filesystem; until then older KV is evicted for new",
    "lock": "find the process that holds it: lslocks",
}


def _remedy(said: str) -> str:
    """Return what to do about an error that places often have; empty for others."""
    return next((todo for sign, todo in _REMEDIES.items() if sign in said), "")
