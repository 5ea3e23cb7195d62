"""`PrefillCost`: seconds that an engine takes to compute prompts and answers; how it is learned."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.cost.fit import OnlineFit
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

__all__ = [
    "VERSION",
    "LearnedPrefill",
    "OtherCostVersion",
    "PrefillCost",
    "PrefixChoice",
    "best_prefix",
    "check_version",
    "read_json",
    "write_json",
]

VERSION: Final = 1
"""Version of the format: the field ``kvkeep_cost`` of every file."""
_MAX_FILE: Final = 1 << 20


class OtherCostVersion(InvalidValue):
    """A file of costs in a version of the format that this kvkeep does not read."""


def check_version(found: Mapping[str, object]) -> None:
    """Check the field ``kvkeep_cost`` of a file of costs.

    Raises:
        OtherCostVersion: it is a whole number, and not this version.
        InvalidValue: it is missing, or no version.
    """
    if "kvkeep_cost" not in found:
        raise InvalidValue(f"kvkeep_cost is missing; a file of costs has {VERSION} there")
    version = found["kvkeep_cost"]
    if type(version) is int and version == VERSION:
        return
    kind = OtherCostVersion if type(version) is int else InvalidValue
    raise kind(f"kvkeep_cost is {told(version)}; {VERSION} is needed, as `kvkeep serve` writes it")


def read_json(path: Path) -> object:
    """Return what a JSON file holds. Raises `InvalidValue` with its name."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    if len(text) > _MAX_FILE:
        raise InvalidValue(f"{path} has more than {_MAX_FILE:,} bytes: it is no cost file")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is not JSON") from error


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a JSON file whole, or leave an old one as it is. Raises `InvalidValue` with its name.

    A path that is no regular file, such as ``/dev/stdout``, is written to.
    """
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidValue(f"cannot write {path}: {error.strerror}") from error


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


class PrefixChoice(NamedTuple):
    """The prefix to load: ``tokens`` of it; the seconds it takes, and those without loading."""

    tokens: int
    seconds: float
    compute_s: float


def best_prefix(
    computed: int,
    tokens: int,
    runs: Iterable[tuple[int, float]],
    compute_s: Callable[[int, int], float],
    *,
    compute_free_s: float = 0.0,
    load_free_s: float = 0.0,
) -> PrefixChoice:
    """Return how much of a stored prefix to load, if the rest is computed behind it.

    ``runs`` are pieces of the prefix behind the ``computed`` first tokens, in order: the end of
    each, in tokens, and the seconds to load it. Loads begin after ``load_free_s``, computing after
    ``compute_free_s``, when older prompts leave them room. A piece is loaded whole or not at all:
    the longer the prefix, the more attention each token of it saves, so nothing in between is
    better than both ends. ``tokens`` are those of the prompt, of which the last is computed in any
    case.
    """
    alone = compute_free_s + compute_s(computed, tokens)
    best = PrefixChoice(computed, alone, alone)
    loading = load_free_s
    for end, seconds in runs:
        loading += seconds
        took = max(loading, compute_free_s) + compute_s(min(end, tokens - 1), tokens)
        if took < best.seconds:
            best = PrefixChoice(end, took, alone)
    return best
