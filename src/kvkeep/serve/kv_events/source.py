"""`Stream`: what to do with each message, told from its sequence number. No sockets here."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from enum import Enum

from kvkeep.core.errors import InvalidValue

__all__ = ["MessageAction", "ReaderStats", "Source", "Stream", "check_endpoint", "digest"]


def check_endpoint(endpoint: str) -> None:
    """`InvalidValue` for what ZeroMQ would take amiss, or take for something else."""
    scheme, found, rest = endpoint.partition("://")
    _, _, port = rest.rpartition(":")
    sound = scheme in {"tcp", "ipc", "inproc"} and bool(found and rest)
    if sound and scheme == "tcp":
        sound = port == "*" or (port.isdecimal() and len(port) < 6 and int(port) <= 65_535)
    if not sound:
        raise InvalidValue(f"an endpoint is tcp://HOST:PORT or ipc:///PATH, got {endpoint!r}")


@dataclass(frozen=True, slots=True)
class Source:
    """A publisher: whose blocks it tells of, and where.

    ``replay`` is the address of its replay socket (None: it has none, and what is missed cannot be
    asked for). ``topic`` is a prefix; "" takes all.
    """

    instance: str
    endpoint: str
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for address in (self.endpoint, self.replay):
            if address is not None:
                check_endpoint(address)


@dataclass(slots=True)
class ReaderStats:
    """What was read of one source, and what was wrong with it."""

    batches: int = 0
    events: int = 0
    malformed: int = 0
    """Messages that were no batch."""
    unread: int = 0
    """Events of unknown types, or that lack something."""
    duplicates: int = 0
    gaps: int = 0
    """How often batches were missing behind one that was taken."""
    restarts: int = 0
    replays: int = 0
    snapshots: int = 0
    resets: int = 0
    """How often all that was known was given up."""
    partial: bool = False
    """Whether what was before the oldest batch that could be had is unknown."""
    connected: bool = False

    def as_dict(self) -> dict[str, int | bool]:
        """By name."""
        return asdict(self)


class MessageAction(Enum):
    """What to do with a message."""

    TAKE = "take"
    SKIP = "skip"  # taken already, from a replay
    GAP = "gap"  # some before it are missing
    RESTART = "restart"  # the publisher has begun anew


def digest(payload: bytes) -> bytes:
    """What a payload is remembered by."""
    return hashlib.blake2b(payload, digest_size=16).digest()


class Stream:
    """Sequence numbers of one publisher: what was taken last, and what that makes of the next.

    Numbers of a publisher only grow, so one that is not above the last that came *live* means that
    it was restarted; one between that and the last taken came in a replay before. A restarted
    publisher whose numbers happen to fit is found out by asking for the last batch once more
    (`same`): times are part of a payload.

    ``taken`` is None as long as nothing is known.
    """

    def __init__(self) -> None:
        self.taken: int | None = None
        self._anywhere = False
        self._live = -1
        self._digest: bytes | None = None

    def live(self, seq: int) -> MessageAction:
        """A message with this number came by subscription."""
        if seq <= self._live:
            return MessageAction.RESTART
        if self.taken is None:
            return MessageAction.TAKE if seq == 0 or self._anywhere else MessageAction.GAP
        if seq <= self.taken:
            self._live = seq
            return MessageAction.SKIP
        return MessageAction.TAKE if seq == self.taken + 1 else MessageAction.GAP

    def took(self, seq: int, payload: bytes | None, *, live: bool = False) -> None:
        """Everything up to this number is taken; ``payload`` is None for a snapshot."""
        self.taken = seq
        self._digest = None if payload is None else digest(payload)
        if live:
            self._live = seq

    def same(self, seq: int, payload: bytes) -> bool:
        """Whether this is the batch that was taken last."""
        if seq != self.taken:
            return False
        if self._digest is None:  # of a snapshot, the number alone is known
            self._digest = digest(payload)
        return self._digest == digest(payload)

    def reset(self, *, anywhere: bool = False) -> None:
        """Nothing is known; ``anywhere``: what was before cannot be had, whatever comes is next."""
        self.taken = None
        self._anywhere = anywhere
        self._live = -1
        self._digest = None
