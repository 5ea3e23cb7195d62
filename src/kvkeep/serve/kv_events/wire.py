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
    "decode",
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
