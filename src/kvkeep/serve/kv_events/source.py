"""`Source`, a publisher to follow, and `Stream`, which classifies its messages without I/O."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from enum import Enum

from kvkeep.core.errors import InvalidValue

__all__ = ["MessageAction", "ReaderStats", "Source", "Stream", "check_endpoint", "digest"]


def check_endpoint(endpoint: str) -> None:
    """Raise `InvalidValue` unless ZeroMQ accepts this address and reads it as intended."""
    scheme, found, rest = endpoint.partition("://")
    _, _, port = rest.rpartition(":")
    sound = scheme in {"tcp", "ipc", "inproc"} and bool(found and rest)
    if sound and scheme == "tcp":
        sound = port == "*" or (port.isdecimal() and len(port) < 6 and int(port) <= 65_535)
    if not sound:
        raise InvalidValue(f"an endpoint is tcp://HOST:PORT or ipc:///PATH, got {endpoint!r}")


@dataclass(frozen=True, slots=True)
class Source:
    """A publisher of KV events: the instance whose blocks it describes, and its addresses.

    ``replay`` is its replay socket; with None, missed batches cannot be recovered. All topics are
    received.
    """

    instance: str
    endpoint: str
    replay: str | None = None

    def __post_init__(self) -> None:
        for address in (self.endpoint, self.replay):
            if address is not None:
                check_endpoint(address)


@dataclass(slots=True)
class ReaderStats:
    """Counters of one source."""

    batches: int = 0
    events: int = 0
    malformed: int = 0
    """Messages that could not be decoded, or that the receiver failed on."""
    unread: int = 0
    """Events of unknown types, or with missing or oversized fields."""
    duplicates: int = 0
    gaps: int = 0
    """Gaps found behind a batch that was taken."""
    restarts: int = 0
    replays: int = 0
    snapshots: int = 0
    resets: int = 0
    """Times that all known blocks were forgotten."""
    partial: bool = False
    """Whether blocks from before the oldest recovered batch are unknown."""
    connected: bool = False

    def as_dict(self) -> dict[str, int | bool]:
        """Return the counters by name."""
        return asdict(self)


class MessageAction(Enum):
    """The reader's action on a live message."""

    TAKE = "take"
    SKIP = "skip"  # a replay brought it already
    GAP = "gap"  # batches before it are missing
    RESTART = "restart"  # the publisher was restarted


def digest(payload: bytes) -> bytes:
    """Return the digest by which `Stream` recognises a payload."""
    return hashlib.blake2b(payload, digest_size=16).digest()


class Stream:
    """The sequence numbers of one publisher: the last batch taken, and the action on the next.

    A publisher's numbers only grow. A live number not above the last live one means that it was
    restarted; one above that but not above the last taken was in a replay before. A restarted
    publisher whose numbers happen to continue is found by requesting the last batch once more
    (`is_last`): its payload differs, since payloads contain the time.

    ``taken`` is the last number taken, None while nothing is known.
    """

    def __init__(self) -> None:
        self.taken: int | None = None
        self._anywhere = False
        self._live = -1
        self._digest: bytes | None = None

    def classify(self, seq: int) -> MessageAction:
        """Return the action on a live message of this number."""
        if seq <= self._live:
            return MessageAction.RESTART
        if self.taken is None:
            return MessageAction.TAKE if seq == 0 or self._anywhere else MessageAction.GAP
        if seq <= self.taken:
            self._live = seq
            return MessageAction.SKIP
        return MessageAction.TAKE if seq == self.taken + 1 else MessageAction.GAP

    def advance(self, seq: int, payload: bytes | None, *, live: bool = False) -> None:
        """Note that all batches up to ``seq`` are taken; ``payload`` is None for a snapshot."""
        self.taken = seq
        self._digest = None if payload is None else digest(payload)
        if live:
            self._live = seq

    def is_last(self, seq: int, payload: bytes) -> bool:
        """Whether this is the last batch taken."""
        if seq != self.taken:
            return False
        if self._digest is None:  # after a snapshot only the number is known
            self._digest = digest(payload)
        return self._digest == digest(payload)

    def reset(self, *, anywhere: bool = False) -> None:
        """Forget everything. ``anywhere``: the next message may have any number, not just 0."""
        self.taken = None
        self._anywhere = anywhere
        self._live = -1
        self._digest = None
