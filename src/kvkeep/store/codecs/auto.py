"""`auto`: the codec with which a tier's blocks arrive first, within the error allowed.

A block is there after the tier's latency and the slower of two things that go on at once: moving
its encoded bytes, and decoding them. So a slow tier wants small records and a fast one records that
decode fast. Ratio and speed are measured here, on the first block; what an error does to the model
is not known here, so lossy codecs are taken from a file that ``kvkeep codec measure`` wrote for the
model, and a codec without figures there is never chosen.
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry.units import parse_bytes
from kvkeep.store.codecs.base import Codec, Damaged
from kvkeep.store.codecs.keyfile import nonblocking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.store.codecs.base import BlockShape

__all__ = [
    "FIGURES_VERSION", "AutoCodec", "AutoSetting", "CodecSpeed", "candidates", "choose",
    "read_nats", "seconds_to_read",
]  # fmt: skip

FIGURES_VERSION: Final = 1
"""Version of the file that ``kvkeep codec measure`` writes: its field ``kvkeep_codecs``."""
_EXACT: Final = ("raw", "lossless")
_UNNUMBERED: Final = -1
_SEALED: Final = 0xFFFF  # above every encrypted codec's
_ASSUMED: Final = 1e9  # bytes per second of a tier that was not read yet
_EVERY: Final = 64  # blocks between two choices
_GAIN: Final = 0.9  # of the time with the present codec that another one must stay below
_MOST_FILE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """A codec's raw bytes for each encoded one, raw bytes a second decoded, and nats."""

    ratio: float
    decode: float
    nats: float = 0.0


def seconds_to_read(raw_bytes: int, speed: CodecSpeed, latency: float, bandwidth: float) -> float:
    """Return the seconds until ``raw_bytes`` are there: moving and decoding overlap."""
    return latency + max(raw_bytes / speed.ratio / bandwidth, raw_bytes / speed.decode)


def choose(
    speeds: Mapping[str, CodecSpeed],
    nats: float,
    raw_bytes: int,
    *,
    latency: float = 0.0,
    bandwidth: float,
    now: str | None = None,
) -> str:
    """Return the name of the fastest codec of at most ``nats``; at least one must be allowed.

    The codec of ``now`` stays until another takes less than 90 % of its time. Pure.
    """
    took = {
        name: seconds_to_read(raw_bytes, one, latency, bandwidth)
        for name, one in speeds.items()
        if one.nats <= nats
    }
    best = min(took, key=lambda name: (took[name], speeds[name].nats))
    if now in took and took[best] > _GAIN * took[now]:
        return now
    return best


@dataclass(frozen=True, slots=True)
class AutoSetting:
    """What stands behind ``auto:``: nats allowed, file of figures, bandwidth in bytes a second.

    Without a file only exact codecs are candidates; without a bandwidth it is learned.
    """

    nats: float
    figures: str | None = None
    bandwidth: float | None = None

    @classmethod
    def of(cls, text: str) -> AutoSetting:
        """Read ``nats=1e-3,figures=FILE,bandwidth=100MB/s``. Raises `InvalidValue`."""
        given: dict[str, str] = {}
        for part in text.split(",") if text else ():
            key, equals, value = part.partition("=")
            if key not in ("nats", "figures", "bandwidth") or not equals or key in given:
                raise InvalidValue(
                    f"codec=auto:{text} is not understood at {part!r}; give "
                    "auto:nats=1e-3,figures=FILE, and bandwidth=100MB/s if it is known"
                )
            given[key] = value
        try:
            nats = float(given.get("nats", "0"))
        except ValueError:
            nats = math.nan
        if not 0 <= nats < math.inf:
            raise InvalidValue(f"nats={given['nats']} is no number of nats, such as 1e-3")
        bandwidth = None
        if "bandwidth" in given:
            bandwidth = float(parse_bytes(given["bandwidth"].removesuffix("/s")))
            if bandwidth <= 0:
                raise InvalidValue("bandwidth is 0; give bytes per second, such as 100MB/s")
        return cls(nats, given.get("figures"), bandwidth)


def read_nats(path: Path, shape: BlockShape) -> dict[str, float]:
    """Return the nats of each codec that ``kvkeep codec measure`` wrote to ``path``.

    Raises:
        InvalidValue: it cannot be read, is no such file, or was measured for KV of another shape.
    """
    try:
        with open(path, "rb", opener=nonblocking) as file:
            text = file.read(_MOST_FILE + 1) or b""
        found: Any = json.loads(text) if len(text) <= _MOST_FILE else None
        version = found["kvkeep_codecs"]
        if type(version) is not int:
            raise TypeError
        if version != FIGURES_VERSION:
            raise InvalidValue(
                f"{path} has figures of codecs in version {version}; this kvkeep reads "
                f"{FIGURES_VERSION}"
            )
        parts = [list(map(int, part)) for part in found["parts"]]
        nats = {str(one["codec"]): float(one["nats"]) for one in found["codecs"]}
        if not all(0 <= value < math.inf for value in nats.values()):
            raise ValueError
        if any(name.partition(":")[0] == AutoCodec.name for name in nats):
            raise ValueError  # it would choose among codecs that may be itself
    except InvalidValue:
        raise
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidValue(
            f"{path} is no file of codecs; kvkeep codec measure --out {path} writes one"
        ) from error
    shapes = shape.kinds or (shape,)
    if not any(parts == [list(part) for part in one.parts] for one in shapes):
        raise InvalidValue(
            f"{path} was measured for another model: its KV has other layers or heads; run "
            "kvkeep codec measure for this model"
        )
    return nats


class AutoCodec(Codec):
    """Encodes each block by the codec that `choose` takes of ``codecs``, by name with their nats.

    Of the codecs, those above ``nats`` are left out. Records have the number of the codec chosen,
    so all of them stay readable. The choice is made anew every 64 blocks.

    Thread safety: all methods. Cost: the first block is encoded and decoded by every candidate.
    """

    name = "auto"

    def __init__(
        self,
        codecs: Sequence[tuple[Codec, float]],
        nats: float,
        *,
        bandwidth: float | None = None,
    ) -> None:
        self.codecs = [(codec, cost) for codec, cost in codecs if cost <= nats]
        assert self.codecs, "raw is always allowed"
        self.exact = all(codec.exact for codec, _ in self.codecs)
        sealed = any(codec.number >= 64 for codec, _ in self.codecs)
        self.number = _SEALED if sealed else _UNNUMBERED
        self._nats = nats
        self._bandwidth = bandwidth
        self._link: Callable[[], tuple[float, float] | None] = lambda: None
        self._speeds: dict[str, CodecSpeed] = {}
        self._lock = threading.Lock()
        self._now = self.codecs[0][0]
        self._left = 0

    def follow(self, link: Callable[[], tuple[float, float] | None]) -> bool:
        self._link = link
        return self._bandwidth is None

    @property
    def label(self) -> str:
        """The name, and the codec chosen now: "auto: int8"."""
        return f"auto: {self._now.name}"

    def chosen(self, raw: memoryview) -> Codec:
        """Return the codec for a block, which is measured if it is the first."""
        with self._lock:
            if not self._speeds:
                self._speeds = {str(n): self._measured(n, raw) for n in range(len(self.codecs))}
            if self._left <= 0:
                self._left = _EVERY
                now = next(n for n, (codec, _) in enumerate(self.codecs) if codec is self._now)
                latency, bandwidth = self._read_cost()
                best = choose(
                    self._speeds, self._nats, len(raw),
                    latency=latency, bandwidth=bandwidth, now=str(now),
                )  # fmt: skip
                self._now = self.codecs[int(best)][0]
            self._left -= 1
            return self._now

    def _measured(self, number: int, raw: memoryview) -> CodecSpeed:
        codec, nats = self.codecs[number]
        out = memoryview(bytearray(codec.bound(len(raw))))
        back = memoryview(bytearray(len(raw)))
        size = codec.encode(raw, out, b"")
        codec.decode(out[:size], back, b"")  # warm: the first call allocates
        began = time.thread_time()
        codec.decode(out[:size], back, b"")
        seconds = max(time.thread_time() - began, 1e-9)
        return CodecSpeed(len(raw) / max(size, 1), len(raw) / seconds, nats)

    def _read_cost(self) -> tuple[float, float]:
        """Return the tier's latency in seconds and its bytes per second, as far as known."""
        if self._bandwidth is not None:
            return 0.0, self._bandwidth
        return self._link() or (0.0, _ASSUMED)

    def bound(self, raw_bytes: int) -> int:
        """Return the largest bound of all candidates."""
        return max(codec.bound(raw_bytes) for codec, _ in self.codecs)

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode by the codec chosen now."""
        return self.chosen(raw).encode(raw, out, bound_to)

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Raise `Damaged`: no record has this codec's number."""
        raise Damaged("auto is no codec of records")


def candidates(figures: str | None, shape: BlockShape) -> dict[str, float]:
    """Return the names of the codecs to choose from, with their nats: exact ones have 0."""
    measured = read_nats(Path(figures), shape) if figures else {}
    return {**dict.fromkeys(_EXACT, 0.0), **{n: v for n, v in measured.items() if n not in _EXACT}}
