"""The messages: vLLM's, field by field, in msgpack.

    PUB      [topic, seq (8 bytes, big-endian), payload]
    payload  [ts, [event, …], dp_rank]        each event a map with "type"
    replay   DEALER → ROUTER  ["", first seq]
             ROUTER → DEALER  ["", topic, seq, payload] …, then ["", "", -1, ""]

A replay from `SNAPSHOT`, a number that no batch reaches, requests all blocks that are held now. A
vLLM publisher replies with the end marker alone, so the request is safe.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvkeep.core.errors import InvalidValue
from kvkeep.core.public import SALT_MARK

__all__ = [
    "END",
    "PUBLIC_SALT",
    "SEQ_BYTES",
    "SNAPSHOT",
    "AllBlocksCleared",
    "Batch",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "KVEvent",
    "MessageAction",
    "ReaderStats",
    "Source",
    "Stream",
    "check_endpoint",
    "decode",
    "digest",
    "encode",
    "salt_digest",
    "seq_frame",
]


SEQ_BYTES = 8
END = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
SNAPSHOT = 2**64 - 1

# Bounds on one message. msgspec checks a list's claimed length before it allocates the list.
MOST_BYTES = 8 << 20
"""Bytes of a message; that for a stored prompt of a million tokens has about 5 MB."""
MOST_RANKS = 1 << 16
_MOST_EVENTS = 1 << 17
_MOST_BLOCKS = 1 << 20
_MOST_TOKENS = 1 << 22
_LONGEST_HASH = 64  # bytes
_LONGEST_NAME = 256  # characters of an adapter, a tier, a kind of layer

PUBLIC_SALT = f"{SALT_MARK}public"
"""In place of a salt's digest in the first block: all salts share what begins so."""
_SALT_MAGIC = b"kvkeep salt 1\n"

BlockHash = int | Annotated[bytes, Meta(max_length=_LONGEST_HASH)]
_Hashes = Annotated[list[BlockHash], Meta(max_length=_MOST_BLOCKS)]
_Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that became reusable, in order behind their parent, ``block_size`` tokens each.

    ``medium`` names the tier: "GPU", "CPU", "STORAGE", "DISK", …; None is "GPU".
    """

    block_hashes: _Hashes
    parent_block_hash: BlockHash | None
    token_ids: Annotated[list[int], Meta(max_length=_MOST_TOKENS)]
    block_size: int
    lora_id: int | None
    medium: _Name | None
    lora_name: _Name | None
    extra_keys: Annotated[list[list[Any] | None], Meta(max_length=_MOST_BLOCKS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: _Name | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that are no longer reusable in a tier."""

    block_hashes: _Hashes
    medium: _Name | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block is reusable any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""An event in a batch."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message; ``ts`` is in seconds since 1970."""

    ts: float
    events: Annotated[list[KVEvent], Meta(max_length=_MOST_EVENTS)]
    data_parallel_rank: int | None = None


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are not decoded yet."""

    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=_MOST_EVENTS)]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(Batch)
_envelopes = msgspec.msgpack.Decoder(_Envelope)
_events = msgspec.msgpack.Decoder(KVEvent)


def encode(batch: Batch) -> bytes:
    """Return the payload of a batch."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> tuple[Batch, int]:
    """Return a payload's batch, and the number of its events that were skipped.

    Skipped are events of unknown types (a newer publisher may send them), with missing fields, with
    more than `_MOST_BLOCKS` or `_MOST_TOKENS`, or with names longer than `_LONGEST_NAME`. Raises
    `InvalidValue` if the batch itself cannot be read, has more than `_MOST_EVENTS`, or a rank out
    of range. Memory while decoding: at worst about 60 bytes per byte of payload.
    """
    try:
        batch, unread = _batches.decode(payload), 0
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        batch, unread = _one_by_one(payload)
    rank = batch.data_parallel_rank
    if rank is not None and not 0 <= rank < MOST_RANKS:
        raise InvalidValue(f"a data-parallel rank must be below {MOST_RANKS}, got {rank}")
    return batch, unread


def _one_by_one(payload: bytes) -> tuple[Batch, int]:
    try:
        envelope = _envelopes.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidValue(f"not a batch of KV events: {error}") from error
    events: list[KVEvent] = []
    for raw in envelope.events:
        try:
            events.append(_events.decode(raw))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
    batch = Batch(envelope.ts, events, envelope.data_parallel_rank)
    return batch, len(envelope.events) - len(events)


def seq_frame(seq: int) -> bytes:
    """Return a sequence number as a frame."""
    return seq.to_bytes(SEQ_BYTES, "big")


def salt_digest(salt: str) -> str:
    """Return the digest that stands for a ``cache_salt`` in events, hiding the salt from readers.

    Equal salts have equal digests everywhere, so a router can compute one from a request. A digest
    is returned unchanged. A guessable salt can be found by trying: use random ones.
    """
    if salt.startswith(SALT_MARK):
        return salt
    digest = hashlib.sha256(_SALT_MAGIC + salt.encode("utf-8", "surrogatepass")).hexdigest()
    return SALT_MARK + digest[:32]


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
