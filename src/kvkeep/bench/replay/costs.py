"""`PrefillCost`: what computing takes, in seconds, measured or given."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

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
    """Tokens ``start`` … ``stop - 1`` of a prompt were computed in so many seconds."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost that was fitted, and by what share it misses what was measured: one for each."""

    cost: PrefillCost
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Of the measured times; half of them are missed by less."""
        return float(np.median(np.abs(self.errors)))

    @property
    def largest_error(self) -> float:
        """Of the measured times."""
        return float(np.max(np.abs(self.errors)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds that an engine takes, alone with one prompt.

    Tokens a … b - 1 of a prompt behind what is cached of it take ``seconds_fixed`` +
    ``seconds_per_token`` · (b - a) + ``seconds_per_token_pair`` · (b² - a²) / 2: the last is
    attention, where each token looks at all before it. Each token of an answer but its first takes
    ``decode_seconds_per_token``. ``kv_bytes_per_token`` is what would have to be moved instead; 0
    where that is not known. ``name`` says what was measured.

    Raises `InvalidValue` for what is no number, below 0, or above 10¹².
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
                raise InvalidValue(f"{field} is {_shown(value)}; a number is needed")
            if not 0 <= value <= _MAX_VALUE:  # NaN is in no range
                raise InvalidValue(f"{field} is {_shown(value)}; 0 … {_MAX_VALUE:g} is needed")
            object.__setattr__(self, field, float(value))
        name: object = self.name
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InvalidValue(
                f"name is text of at most {_MAX_NAME} characters, got {_shown(name)}"
            )

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds for tokens ``start`` … ``stop - 1``; nothing is to be done for none."""
        if stop <= start:
            return 0.0
        linear = self.seconds_per_token * (stop - start)
        pairs = (stop * stop - start * start) / 2
        return self.seconds_fixed + linear + self.seconds_per_token_pair * pairs

    def decode_s(self, tokens: int) -> float:
        """Seconds for an answer of ``tokens`` after its first one."""
        return self.decode_seconds_per_token * max(0, tokens - 1)

    # --- measured ------------------------------------------------------------------------------

    @classmethod
    def fit(cls, points: Sequence[Measured], **others: Any) -> Fit:
        """The cost that comes closest to what was measured; ``others`` are its other fields.

        Least squares of the relative errors, so that short prompts count as much as long ones,
        with no coefficient below 0. Raises `InvalidValue` for nothing measured, or times that are
        none.
        """
        if not points:
            raise InvalidValue("a cost is fitted to times that were measured, got none")
        for point in points:
            if not 0 <= point.start < point.stop or not 0 < point.seconds < math.inf:
                raise InvalidValue(f"{point} is no measured time of a prompt")
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
        """For JSON; `of` reads it."""
        return {"kvkeep_cost": _VERSION, **asdict(self)}

    @classmethod
    def of(cls, found: object) -> PrefillCost:
        """What `as_dict` gave. Raises `InvalidValue` that says what is wrong."""
        if not isinstance(found, dict):
            raise InvalidValue(f"a cost is an object, got {_shown(found)}")
        version = found.get("kvkeep_cost")
        if isinstance(version, bool) or version != _VERSION:
            raise InvalidValue(
                f"kvkeep_cost is {_shown(version)}; {_VERSION} is read, as `kvkeep calibrate` "
                "writes it"
            )
        if "seconds_per_token" not in found:
            raise InvalidValue("seconds_per_token is missing")
        known = {key: found[key] for key in (*_NUMBERS, "name") if key in found}
        return cls(**known)

    @classmethod
    def read(cls, path: Path) -> PrefillCost:
        """The cost in a file of JSON. Raises `InvalidValue` with its name for what is none."""
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
        if len(text) > _MAX_FILE:
            raise InvalidValue(f"{path} has more than {_MAX_FILE:,} bytes: it is no cost")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"{path} is not JSON") from error
        try:
            return cls.of(found)
        except InvalidValue as error:
            raise InvalidValue(f"{path}: {error}") from error

    def write(self, path: Path, **more: Any) -> None:
        """Write it to a file, over what is there; ``more`` stands beside it, for people.

        Raises `InvalidValue` where that cannot be.
        """
        text = json.dumps({**self.as_dict(), **more}, indent=2, allow_nan=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidValue(f"cannot write {path}: {error.strerror}") from error


def _non_negative(terms: Floats) -> Floats:
    """The coefficients, none below 0, with which the terms come closest to 1 in each row.

    Where coefficients would be below 0 the best ones lie where some are 0: of few terms, each
    choice of those that are not can be tried.
    """
    count = terms.shape[1]
    scale = np.abs(terms).max(0)
    scaled = terms / scale  # squares of lengths beside ones: to be comparable
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            some = list(chosen)
            found = np.linalg.lstsq(scaled[:, some], np.ones(len(terms)), rcond=None)[0]
            if (found < 0).any():
                continue
            rest = float(((scaled[:, some] @ found - 1) ** 2).sum())
            # More terms only where they tell something: not for what is rounding.
            if rest < least * (1 - 1e-9) - 1e-18:
                best, least = np.zeros(count), rest
                best[some] = found
    result: Floats = best / scale
    return result


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # digits beyond Python's limit
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "…"
