"""`CostModel`: what an engine and its store have learned of their costs, in one place and file."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.cost.prefill import (
    VERSION,
    LearnedPrefill,
    OtherCostVersion,
    PrefillCost,
    check_version,
    read_json,
    write_json,
)
from kvkeep.core.cost.transfer import LearnedTransfer, TransferCost
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

__all__ = ["CostFile", "CostModel"]

_MOST_TIERS: Final = 64
_MAX_NAME: Final = 512


class CostModel:
    """The costs of one model on one machine: of prefill, and of each tier's reads and writes.

    All are learned while they are used. ``prefill``, ``reads`` and ``writes`` are seeds, measured
    before. ``model`` names what computes, so that its costs are not taken for another's; "" if
    unknown. The bytes of transfers are those of raw KV, so the codec is part of a tier's cost.

    Thread safety: all methods.

    Raises `InvalidValue` for more than 64 tiers, or a name that is too long.
    """

    def __init__(
        self,
        prefill: PrefillCost | None = None,
        *,
        reads: Mapping[str, TransferCost] | None = None,
        writes: Mapping[str, TransferCost] | None = None,
        model: str = "",
    ) -> None:
        given = {**(reads or {}), **(writes or {})}
        if len(given) > _MOST_TIERS or any(len(name) > _MAX_NAME for name in (*given, model)):
            raise InvalidValue(
                f"costs are of {_MOST_TIERS} tiers at most, with names of {_MAX_NAME} characters"
            )
        self.model = model
        self.prefill = LearnedPrefill(prefill)
        self._lock = threading.Lock()
        self._reads = {name: LearnedTransfer(cost) for name, cost in (reads or {}).items()}
        self._writes = {name: LearnedTransfer(cost) for name, cost in (writes or {}).items()}

    def reading(self, tier: str) -> LearnedTransfer:
        """Return the cost of reads from ``tier``, a name that is unique in its store."""
        with self._lock:
            return self._reads.setdefault(tier, LearnedTransfer())

    def writing(self, tier: str) -> LearnedTransfer:
        """Return the cost of writes to ``tier``."""
        with self._lock:
            return self._writes.setdefault(tier, LearnedTransfer())

    def reads(self) -> dict[str, TransferCost]:
        """Return what is known of reads, by tier."""
        with self._lock:
            learned = dict(self._reads)
        return {name: one.cost for name, one in learned.items() if one.known}

    def load_s(self, tier_bytes: Mapping[str, float]) -> float:
        """Return the expected seconds to read so many bytes from each tier, one after another.

        Tiers of which nothing is known count as free: reading them is how they become known.
        """
        return sum(self.reading(tier).seconds(nbytes) for tier, nbytes in tier_bytes.items())

    # --- shown and saved -------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return all costs for JSON, with their errors and numbers of observations.

        A file of it is one of `PrefillCost` as well, if anything of prefill is known.
        """
        with self._lock:
            reads, writes = dict(self._reads), dict(self._writes)
        tiers: dict[str, Any] = {}
        for kind, costs in (("read", reads), ("write", writes)):
            for name, learned in costs.items():
                if learned.known:
                    tiers.setdefault(name, {})[kind] = {
                        **learned.cost.as_dict(), "error": learned.error,
                        "observations": learned.observations,
                    }  # fmt: skip
        found: dict[str, Any] = {"kvkeep_cost": VERSION, "model": self.model, "tiers": tiers}
        if self.prefill.known:
            found = {
                **self.prefill.cost.as_dict(), "error": self.prefill.error,
                "observations": self.prefill.observations, **found,
            }  # fmt: skip
        return found

    @classmethod
    def of(cls, found: object) -> CostModel:
        """Return the model of an `as_dict`, or of a `PrefillCost`'s.

        One with tiers may lack ``kvkeep_cost`` or all of prefill, as people write it.

        Raises:
            OtherCostVersion: ``kvkeep_cost`` is another version.
            InvalidValue: it is neither of them.
        """
        if not isinstance(found, dict):
            raise InvalidValue(f"costs are an object, got {told(found)}")
        if "kvkeep_cost" in found or "tiers" not in found:
            check_version(found)
        tiers, model = found.get("tiers", {}), found.get("model", "")
        if not isinstance(tiers, dict) or not all(isinstance(one, dict) for one in tiers.values()):
            raise InvalidValue(f"tiers are objects with read and write, got {told(tiers)}")
        if not isinstance(model, str):
            raise InvalidValue(f"model is text, got {told(model)}")
        known: dict[str, dict[str, TransferCost]] = {"read": {}, "write": {}}
        for kind, costs in known.items():
            for name, one in tiers.items():
                if kind not in one:
                    continue
                try:
                    costs[name] = TransferCost.of(one[kind])
                except InvalidValue as error:
                    raise InvalidValue(f"tier {told(name)}, {kind}: {error}") from error
        has_prefill = "tiers" not in found or not found.keys().isdisjoint(PrefillCost.__slots__)
        prefill = PrefillCost.of(found) if has_prefill else None
        return cls(prefill, reads=known["read"], writes=known["write"], model=model)

    @classmethod
    def read(cls, path: Path) -> CostModel:
        """Read a file that `write` or `PrefillCost.write` wrote.

        Raises as `of`, with its name.
        """
        found = read_json(path)
        try:
            return cls.of(found)
        except InvalidValue as error:
            kind = OtherCostVersion if isinstance(error, OtherCostVersion) else InvalidValue
            raise kind(f"{path}: {error}") from error

    def write(self, path: Path) -> None:
        """Write a file, whole or not at all. Raises `InvalidValue` if it cannot be written."""
        write_json(path, self.as_dict())


log = logging.getLogger(__name__)


class CostFile:
    """Reads a `CostModel` from a file if there is one, and writes it now and then.

    It is written every ``every_s`` seconds by a thread of its own, and on `close`. If it cannot be
    written, a warning is logged once, and ``failed`` counts it.

    Thread safety: all methods.

    Attributes:
        cost: what was read, or a new model; it learns on.
        failed: times that the file could not be written.
    """

    def __init__(self, path: Path, cost: CostModel, *, every_s: float = 300.0) -> None:
        self.path = path
        self.cost = cost
        self.failed = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._every_s = every_s
        self._thread = threading.Thread(target=self._run, name="kvkeep costs", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, model: str, *, every_s: float = 300.0) -> Self:
        """Return the file of costs of ``model``, which need not exist.

        Costs without a model, as those of `PrefillCost`, are taken as a seed. Raises `InvalidValue`
        for a file that is none of costs, that names another model, or that has no folder.
        """
        if not path.absolute().parent.is_dir():
            raise InvalidValue(f"cannot write {path}: there is no folder {path.parent}")
        cost = CostModel.read(path) if path.exists() else CostModel()
        if cost.model not in {"", model}:
            raise InvalidValue(
                f"{path} has the costs of {told(cost.model)}, and this is {told(model)}: name "
                "another file, or delete it"
            )
        cost.model = model
        return cls(path, cost, every_s=every_s)

    @classmethod
    def begin(cls, path: Path, model: str, *, every_s: float = 300.0) -> Self | None:
        """Return `open`'s file in a folder that is made if need be; begun anew if it is damaged.

        None, with a warning in the log, if there can be no such folder, or if the file is of
        another version of the format: that stays as it is.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls.open(path, model, every_s=every_s)
        except OSError as error:
            log.warning("costs are not kept: cannot make %s: %s", path.parent, error.strerror)
            return None
        except OtherCostVersion as error:
            log.warning("costs are not kept: %s", error)
            return None
        except InvalidValue as error:
            log.warning("costs are learned anew: %s", error)
            return cls(path, CostModel(model=model), every_s=every_s)

    def save(self) -> None:
        """Write the file now, whole or not at all."""
        with self._lock:
            try:
                self.cost.write(self.path)
            except InvalidValue as error:
                self.failed += 1
                if self.failed == 1:
                    log.warning("costs are not kept: %s", error)

    def close(self) -> None:
        """Write the file for the last time. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self.save()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.save()
