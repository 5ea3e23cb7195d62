"""`CostFile`: what was learned of costs, kept from one run to the next."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvkeep.core.cost.files import OtherCostVersion
from kvkeep.core.cost.model import CostModel
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

__all__ = ["CostFile"]

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
