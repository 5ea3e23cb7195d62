"""`PrefillCost`: seconds that an engine takes to compute prompts and answers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.fields import shown
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["Fit", "Measured", "PrefillCost"]

_VERSION = 1
_MAX_FILE = 1 << 20
_MAX_VALUE = 1e12
_MAX_NAME = 512
_NUMBERS = (
    "seconds_fixed",
    "seconds_per_token",
    "seconds_per_token_pair",
    "decode_seconds_per_token",
    "kv_bytes_per_token",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds measured for computing tokens ``start`` … ``stop - 1`` of a prompt."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost, and its relative error for each measurement."""

    cost: PrefillCost
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def largest_error(self) -> float:
        """Largest absolute relative error."""
        return float(np.max(np.abs(self.errors)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds that an engine takes for one prompt while it computes nothing else.

    Tokens a … b - 1 of a prompt, after cached tokens, take ``seconds_fixed`` +
    ``seconds_per_token`` · (b - a) + ``seconds_per_token_pair`` · (b² - a²) / 2; the last term is
    attention, of each token to all before it. Each token of an answer after the first takes
    ``decode_seconds_per_token``. ``kv_bytes_per_token`` is the size of a token's KV, 0 if unknown.
    ``name`` describes the measured engine or server.

    Raises `InvalidValue` for values that are no numbers in 0 … 10¹².
    """

    seconds_fixed: float = 0.0
    seconds_per_token: float
    seconds_per_token_pair: float = 0.0
    decode_seconds_per_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        for field in _NUMBERS:
            value: object = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidValue(f"{field} is {shown(value)}; a number is needed")
            if not 0 <= value <= _MAX_VALUE:  # NaN is in no range
                raise InvalidValue(f"{field} is {shown(value)}; 0 … {_MAX_VALUE:g} is needed")
            object.__setattr__(self, field, float(value))
        name: object = self.name
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InvalidValue(f"name is text of at most {_MAX_NAME} characters, got {shown(name)}")

    def prefill_s(self, start: int, stop: int) -> float:
        """Return seconds for tokens ``start`` … ``stop - 1``; 0 if there are none."""
        if stop <= start:
            return 0.0
        linear = self.seconds_per_token * (stop - start)
        pairs = (stop * stop - start * start) / 2
        return self.seconds_fixed + linear + self.seconds_per_token_pair * pairs

    def decode_s(self, tokens: int) -> float:
        """Return the seconds to decode an answer of ``tokens`` tokens after its first."""
        return self.decode_seconds_per_token * max(0, tokens - 1)

    # --- measured ------------------------------------------------------------------------------

    @classmethod
    def fit(cls, points: Sequence[Measured], **others: Any) -> Fit:
        """Fit a cost to measurements; ``others`` are its other fields.

        Minimises the squares of the relative errors, so that short prompts count as much as long
        ones, with no negative coefficient. Raises `InvalidValue` for no or invalid measurements.
        """
        if not points:
            raise InvalidValue("a cost needs at least one measurement, got none")
        for point in points:
            if not 0 <= point.start < point.stop or not 0 < point.seconds < math.inf:
                raise InvalidValue(f"{point} is no valid measurement of a prompt")
        starts, stops, seconds = np.array([(p.start, p.stop, p.seconds) for p in points], float).T
        terms = np.stack((np.ones(len(points)), stops - starts, (stops**2 - starts**2) / 2), 1)
        fixed, linear, pair = _non_negative(terms / seconds[:, None]).tolist()
        cost = cls(
            seconds_fixed=fixed,
            seconds_per_token=linear,
            seconds_per_token_pair=pair,
            **others,
        )
        missed = terms @ np.array([fixed, linear, pair]) / seconds - 1
        return Fit(cost, tuple(missed.tolist()))

    # --- files ---------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the cost for JSON; `of` reads it."""
        return {"kvkeep_cost": _VERSION, **asdict(self)}

    @classmethod
    def of(cls, found: object) -> PrefillCost:
        """Return the cost of an `as_dict`. Raises `InvalidValue`."""
        if not isinstance(found, dict):
            raise InvalidValue(f"a cost is an object, got {shown(found)}")
        version = found.get("kvkeep_cost")
        if isinstance(version, bool) or version != _VERSION:
            raise InvalidValue(
                f"kvkeep_cost is {shown(version)}; {_VERSION} is needed, as `kvkeep calibrate` "
                "writes it"
            )
        if "seconds_per_token" not in found:
            raise InvalidValue("seconds_per_token is missing")
        known = {key: found[key] for key in (*_NUMBERS, "name") if key in found}
        return cls(**known)

    @classmethod
    def read(cls, path: Path) -> PrefillCost:
        """Read a JSON file. Raises `InvalidValue` with its name."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
        if len(text) > _MAX_FILE:
            raise InvalidValue(f"{path} has more than {_MAX_FILE:,} bytes: it is no cost file")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"{path} is not JSON") from error
        try:
            return cls.of(found)
        except InvalidValue as error:
            raise InvalidValue(f"{path}: {error}") from error

    def write(self, path: Path, **more: Any) -> None:
        """Write a JSON file, replacing an old one; ``more`` are further fields, for people.

        Raises `InvalidValue` if the file cannot be written.
        """
        text = json.dumps({**self.as_dict(), **more}, indent=2, allow_nan=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidValue(f"cannot write {path}: {error.strerror}") from error


def _non_negative(terms: Floats) -> Floats:
    """Return non-negative coefficients for which the terms come closest to 1 in each row.

    The optimum lies where some coefficients are 0 and the others are free. There are few terms, so
    every choice of free coefficients is tried.
    """
    count = terms.shape[1]
    scale = np.abs(terms).max(0)
    scaled = terms / scale  # n² beside 1: scaled to be comparable
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            some = list(chosen)
            found = np.linalg.lstsq(scaled[:, some], np.ones(len(terms)), rcond=None)[0]
            if (found < 0).any():
                continue
            rest = float(((scaled[:, some] @ found - 1) ** 2).sum())
            # More terms must improve the fit by more than rounding errors.
            if rest < least * (1 - 1e-9) - 1e-18:
                best, least = np.zeros(count), rest
                best[some] = found
    result: Floats = best / scale
    return result
