"""`Capture`: writes the requests of a server as a trace, without their contents."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.traces.native import TraceHeader, TraceWriter
from kvkeep.bench.traces.request import MAX_ID, MAX_TOKENS, Served, TraceRequest
from kvkeep.core.errors import whole
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvkeep.bench.traces.request import UnitArray
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["Capture", "CaptureStats", "KeyedIds", "Seen"]

log = logging.getLogger("kvkeep.traces")

QUEUE_BYTES = 64 << 20
_CLOSE_S = 10.0
_ENTRY_BYTES = 512  # per request, besides its tokens
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """A request that a server has served. ``arrived`` is a time of `time.perf_counter`.

    ``answer`` has the tokens of its first answer, and ``stop`` says how that ended. ``served`` is
    None for a request that failed or whose client disconnected.
    """

    arrived: float
    prompt: TokenArray
    namespace: Namespace
    answer: Sequence[int] = ()
    store: bool = True
    session: str | None = None
    kind: str = ""
    served: Served | None = None
    stop: str = ""

    @property
    def size(self) -> int:
        """Bytes that the request takes in the queue."""
        return self.prompt.nbytes + len(self.answer) * 32 + _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Requests ``written`` and ``dropped``, and whether writing the file has ``failed``."""

    written: int
    dropped: int
    failed: bool


class KeyedIds:
    """Ids and names made with a secret key, so that no reader can confirm a guessed prompt.

    An id is a keyed BLAKE2b of all tokens up to its unit's end, cut to 63 bits. The key is random,
    new for each file, and never leaves this object.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def units(self, tokens: TokenArray, unit_tokens: int) -> UnitArray:
        """Return the prefix-chained ids of a prompt's units. Cost: about 1 µs each."""
        data = memoryview(tokens.astype(TOKEN_DTYPE, copy=False).tobytes())
        running = hashlib.blake2b(key=self._key, digest_size=8, person=b"kvkeep unit")
        step = unit_tokens * TOKEN_BYTES
        digests = bytearray()
        for start in range(0, len(data), step):
            running.update(data[start : start + step])
            digests += running.copy().digest()
        return np.frombuffer(digests, "<i8").astype(np.int64) & np.int64(MAX_ID)

    def name(self, kind: str, value: bytes) -> str:
        """Return the name that replaces ``value``, the name of a namespace or a session."""
        person = f"kvkeep {kind}".encode()[: hashlib.blake2b.PERSON_SIZE]
        return hashlib.blake2b(value, key=self._key, digest_size=8, person=person).hexdigest()


class Capture:
    """A file to which a thread writes requests.

    ``unit_tokens`` are the tokens per id: with the pool's ``page_size`` a replay is exact to the
    page, with 1 exact to the token, at 16 bytes per token. Requests that arrive faster than they
    are written wait in ``queue_bytes`` of memory; further ones are dropped and counted, also in the
    file. An error in writing (a full disk) ends the capture, never the server.

    The file has times, lengths, keyed ids (`KeyedIds`) of prompt and answer, names made with the
    same key, and how requests were served: no text, no tokens, no names of clients. It does show
    that two namespaces have the same prompt.

    Thread-safe; `note` never waits. Raises `InvalidValue` for a file that exists.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        page_size: int,
        pages: int,
        unit_tokens: int | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.path = path
        self.unit_tokens = whole("unit_tokens", unit_tokens or page_size, 1)
        self._queue_bytes = queue_bytes
        self._writer = TraceWriter(path, TraceHeader(name, self.unit_tokens, page_size, pages))
        self._ids = KeyedIds()
        self._began = perf_counter()
        self._changed = threading.Condition()
        self._waiting: deque[Seen] = deque()
        self._bytes = 0
        self._written = 0
        self._dropped = 0
        self._failed = False
        self._closed = False
        self._noted = 0  # dropped requests that the file has recorded
        self._thread = threading.Thread(target=self._run, name="kvkeep capture", daemon=True)
        self._thread.start()

    def note(self, seen: Seen) -> None:
        """Queue a request, or drop it if the queue is full. Its arrays must not change any more."""
        size = seen.size
        with self._changed:
            full = self._bytes + size > self._queue_bytes
            if full or self._closed or self._failed:
                first = not self._dropped and not self._closed
                self._dropped += 1
            else:
                first = False
                self._bytes += size
                self._waiting.append(seen)
                self._changed.notify()
        if first:
            log.warning("capture %s cannot keep up: requests are dropped", self.path)

    def stats(self) -> CaptureStats:
        """Return the counts so far."""
        with self._changed:
            return CaptureStats(self._written, self._dropped, self._failed)

    def close(self) -> bool:
        """Write the queue and end the file; False if that takes over ten seconds. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    # --- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                self._write_all()
            finally:
                self._writer.close()
        except OSError as error:
            log.error("capture %s ends: %s", self.path, error)
            with self._changed:
                self._failed = True
                self._dropped += len(self._waiting)
                self._waiting.clear()
                self._bytes = 0

    def _write_all(self) -> None:
        flushed = monotonic()
        dirty = True  # the header
        while (seen := self._next(wait_s=_FLUSH_S if dirty else None)) is not None:
            if isinstance(seen, Seen):
                self._write(seen)
                dirty = True
            if dirty and monotonic() - flushed >= _FLUSH_S:
                self._writer.flush()
                flushed, dirty = monotonic(), False
        self._note_dropped()

    def _next(self, wait_s: float | None) -> Seen | bool | None:
        """Return the next request; False if none came in time, None at the end."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(wait_s)
            if self._waiting:
                seen = self._waiting.popleft()
                self._bytes -= seen.size
                return seen
            return None if self._closed else False

    def _note_dropped(self) -> None:
        with self._changed:
            dropped = self._dropped - self._noted
            self._noted = self._dropped
        if dropped:
            self._writer.note_dropped(dropped)

    def _write(self, seen: Seen) -> None:
        self._note_dropped()
        self._writer.write(self._request(seen))
        with self._changed:
            self._written += 1

    def _request(self, seen: Seen) -> TraceRequest:
        unit, tokens = self.unit_tokens, len(seen.prompt)
        # The KV of the last token is never computed, so no cache holds it.
        computed = np.array(seen.answer[:-1], TOKEN_DTYPE)
        ids = self._ids.units(np.concatenate((seen.prompt, computed)), unit)
        full = ids[: (tokens + len(computed)) // unit]
        units = ids[: tokens // unit]
        if tokens % unit:
            units = self._ids.units(seen.prompt, unit)
        return TraceRequest(
            max(0.0, seen.arrived - self._began),
            units,
            tokens,
            len(seen.answer),
            self._ids.name("namespace", seen.namespace.canonical()),
            None if seen.session is None else self._ids.name("session", seen.session.encode()),
            None,
            None,
            seen.kind,
            full[tokens // unit :],
            seen.store,
            seen.served,
            seen.stop,
            first_token=self._first_token(seen) if len(seen.answer) else None,
        )

    def _first_token(self, seen: Seen) -> int:
        """Return a number that stands for the first token of an answer, made with the key."""
        name = self._ids.name("first token", str(int(seen.answer[0])).encode())
        return int(name, 16) & MAX_TOKENS
