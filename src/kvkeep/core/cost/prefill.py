"""`PrefillCost`: seconds that an engine takes to compute prompts and answers; how it is learned."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvkeep.core.cost.files import VERSION, check_version, read_json, write_json
from kvkeep.core.cost.fit import OnlineFit
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["LearnedPrefill", "PrefillCost"]

_MAX_VALUE = 1e12
_MAX_NAME = 512
_SEEDED = ((0, 64), (0, 1024), (0, 8192), (8128, 8192), (4096, 8192))  # spans that show a seed
_NUMBERS = (
    "seconds_fixed",
    "seconds_per_token",
    "seconds_per_token_pair",
    "decode_seconds_per_token",
    "kv_bytes_per_token",
)


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
                raise InvalidValue(f"{field} is {told(value)}; a number is needed")
            if not 0 <= value <= _MAX_VALUE:  # NaN is in no range
                raise InvalidValue(f"{field} is {told(value)}; 0 … {_MAX_VALUE:g} is needed")
            object.__setattr__(self, field, float(value))
        name: object = self.name
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise InvalidValue(f"name is text of at most {_MAX_NAME} characters, got {told(name)}")

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

    # --- files ---------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the cost for JSON; `of` reads it."""
        return {"kvkeep_cost": VERSION, **asdict(self)}

    @classmethod
    def of(cls, found: object) -> PrefillCost:
        """Return the cost of an `as_dict`. Raises `InvalidValue`."""
        if not isinstance(found, dict):
            raise InvalidValue(f"a cost is an object, got {told(found)}")
        check_version(found)
        if "seconds_per_token" not in found:
            raise InvalidValue("seconds_per_token is missing")
        known = {key: found[key] for key in (*_NUMBERS, "name") if key in found}
        return cls(**known)

    @classmethod
    def read(cls, path: Path) -> PrefillCost:
        """Read a JSON file. Raises `InvalidValue` with its name."""
        found = read_json(path)
        try:
            return cls.of(found)
        except InvalidValue as error:
            raise InvalidValue(f"{path}: {error}") from error

    def write(self, path: Path, **more: Any) -> None:
        """Write a JSON file, replacing an old one; ``more`` are further fields, for people.

        Raises `InvalidValue` if the file cannot be written.
        """
        write_json(path, {**self.as_dict(), **more})


class LearnedPrefill:
    """Learns the cost of prefill from the forward passes of an engine.

    A pass computes pieces: tokens ``start`` … ``stop - 1`` of one prompt or several. ``seed`` is a
    cost that was measured before; it holds until passes were observed, and afterwards where none
    of such a size was. Thread safety: all methods. See `OnlineFit` for costs and robustness.
    """

    def __init__(self, seed: PrefillCost | None = None) -> None:
        self.kv_bytes_per_token = 0.0 if seed is None else seed.kv_bytes_per_token
        """The size of a token's KV, 0 if unknown; it is part of `cost`."""
        self._seed = seed
        seeds = []
        if seed is not None:
            seeds = [(_terms([span]), max(seed.prefill_s(*span), 1e-9)) for span in _SEEDED]
        self._fit = OnlineFit(3, seeds=seeds, first=1)
        self._largest = _SEEDED[-1][1] if seed is not None else 0

    @property
    def known(self) -> bool:
        """Whether there is a seed, or a pass was observed."""
        return self._fit.known

    @property
    def largest(self) -> int:
        """Tokens of the largest pass observed, or of those that show the seed."""
        return self._largest

    @property
    def error(self) -> float:
        """The relative error to expect: 0.1 is 10 %; 1 as long as no pass was observed."""
        return self._fit.error

    @property
    def observations(self) -> int:
        """Passes observed."""
        return self._fit.observations

    @property
    def cost(self) -> PrefillCost:
        """The cost at present; the seed's decoding and name are kept."""
        fixed, linear, pair = self._fit.coefficients
        seed = self._seed or PrefillCost(seconds_per_token=0.0)
        return replace(
            seed,
            seconds_fixed=fixed,
            seconds_per_token=linear,
            seconds_per_token_pair=pair,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    def prefill_s(self, start: int, stop: int) -> float:
        """Return the expected seconds for tokens ``start`` … ``stop - 1``; 0 if there are none."""
        return 0.0 if stop <= start else self._fit.seconds(_terms([(start, stop)]))

    def observe(self, pieces: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a forward pass over ``pieces``, (start, stop) of each, in ``seconds``."""
        terms = _terms(pieces)
        if terms[1] > 0:
            self._largest = max(self._largest, int(terms[1]))
            self._fit.observe(terms, seconds)


def _terms(pieces: Iterable[tuple[int, int]]) -> tuple[float, float, float]:
    """Return the terms of a pass: itself, its tokens, and its pairs of tokens."""
    tokens, pairs = 0.0, 0.0
    for start, stop in pieces:
        tokens += stop - start
        pairs += (stop * stop - start * start) / 2
    return 1.0, tokens, pairs
