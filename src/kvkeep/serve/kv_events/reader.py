"""`EventReader`: follows publishers of KV events, and finds again what it missed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

import zmq

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.kv_events.subscription import ReplayRequest, Subscription
from kvkeep.serve.kv_events.source import MessageAction, ReaderStats, Source
from kvkeep.serve.kv_events.wire import END, SEQ_BYTES, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.serve.kv_events.wire import KVEvent

__all__ = ["EventReader", "Receiver"]

log = logging.getLogger("kvkeep.feed")

_AT_ONCE = 256  # messages of one source before the others' turn
_CLOSE_S = 5.0
_LONGEST_BACK_OFF_S = 60.0


class Receiver(Protocol):
    """Who is told: `kvkeep.serve.router.PrefixRouter` is one."""

    def apply(self, instance: str, events: Sequence[KVEvent], rank: int = 0) -> None:
        """These happened, in this order."""

    def clear(self, instance: str, rank: int | None = None) -> None:
        """Nothing is known any more of what it holds."""


class EventReader:
    """Follows any number of `Source`s in one thread, and tells ``receiver`` what they say.

    What is missed is found by the sequence numbers, or every ``check_s`` seconds and after each
    reconnection by asking for the last batch once more. Then, as far as it is needed:

    1. what came since is asked for again, if the publisher still has the last batch that was taken;
    2. else a snapshot (of publishers that have one: kvkeep's);
    3. else everything that the publisher still has, which is then a part of the truth.

    Before 2 and 3 `Receiver.clear` is called: what is not known is not made up. A publisher that
    does not answer within ``patience_s`` has no replay; then 3, with nothing.

    Nothing that a publisher sends can end the thread: what cannot be read is counted and skipped.

    Thread safety: all methods may be called from anywhere; ``receiver`` is called in the thread.
    """

    def __init__(
        self,
        sources: Iterable[Source],
        receiver: Receiver,
        *,
        check_s: float = 5.0,
        patience_s: float = 2.0,
    ) -> None:
        if not (check_s > 0 and patience_s > 0):
            raise InvalidValue(f"both are seconds above 0: {check_s=}, {patience_s=}")
        self._receiver = receiver
        self._check_s = check_s
        self._patience_s = patience_s
        self._closing = False
        self._context = zmq.Context()
        self._lines: list[Subscription] = []
        try:
            for source in sources:
                self._lines.append(Subscription(self._context, source))
        except BaseException:
            self._shut()
            raise
        self._bell, self._ear = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvkeep event reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; what was told stays with the receiver."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        self._thread.join(_CLOSE_S)

    def stats(self) -> dict[Source, ReaderStats]:
        """What was read of each source."""
        return {line.source: line.stats for line in self._lines}

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.exception("the reader of KV events ends; what is known grows old")
        finally:
            self._shut()
            self._bell.close()
            self._ear.close()

    def _shut(self) -> None:
        for line in self._lines:
            line.close()
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        for line in self._lines:
            poller.register(line.monitor, zmq.POLLIN)
            # What comes by subscription waits in the socket while there is a question.
            poller.register(line.sub if line.dealer is None else line.dealer, zmq.POLLIN)
        times = [line.next_check if line.dealer is None else line.deadline for line in self._lines]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        ready = {found for found, _ in poller.poll(None if wait is None else int(wait * 1000) + 1)}
        now = time.monotonic()
        for line in self._lines:
            if line.reconnected():
                line.next_check = now
            if line.dealer is not None:
                self._answers(line, line.dealer, now, arrived=line.dealer in ready)
            elif line.sub in ready and now < line.next_check:
                self._messages(line, now)
            if line.dealer is None and now >= line.next_check:
                self._check(line, now)

    def _messages(self, line: Subscription, now: float) -> None:
        for _ in range(_AT_ONCE):
            try:
                frames = line.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if line.source.replay is not None and line.reconnected():
                # This may be another publisher whose numbers happen to go on: its message is left,
                # and comes again with the answer to what is asked now.
                line.next_check = now
                return
            if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
                line.stats.malformed += 1
                continue
            if not self._message(line, int.from_bytes(frames[1], "big"), frames[2], now):
                return

    def _message(self, line: Subscription, seq: int, payload: bytes, now: float) -> bool:
        """Take one that came by subscription; whether to go on with the next."""
        step = line.stream.live(seq)
        if step is MessageAction.TAKE:
            self._take(line, seq, payload, live=True)
            return True
        if step is MessageAction.SKIP:
            line.stats.duplicates += 1
            return True
        if step is MessageAction.RESTART:
            line.stats.restarts += 1
            self._reset(line)
        elif line.stream.taken is not None:  # else it is only where we came in
            line.stats.gaps += 1
        if line.source.replay is not None:
            self._ask(
                line,
                ReplayRequest.SNAPSHOT if line.stream.taken is None else ReplayRequest.SINCE,
                now,
                True,
            )
            return False
        self._start_at(line, seq, payload)
        return True

    def _start_at(self, line: Subscription, seq: int, payload: bytes) -> None:
        """What was before cannot be had: begin here."""
        self._reset(line)
        line.stats.partial = seq > 0
        self._take(line, seq, payload, live=True)

    def _take(self, line: Subscription, seq: int, payload: bytes, *, live: bool = False) -> None:
        self._deliver(line, payload)
        line.stream.took(seq, payload, live=live)

    def _deliver(self, line: Subscription, payload: bytes) -> None:
        try:
            batch, unread = decode(payload)
        except InvalidValue:
            line.stats.malformed += 1
            return
        rank = batch.data_parallel_rank or 0
        line.ranks.add(rank)
        line.stats.batches += 1
        line.stats.events += len(batch.events)
        line.stats.unread += unread
        try:
            self._receiver.apply(line.source.instance, batch.events, rank)
        except Exception:
            log.exception("a batch of %s could not be taken", line.source.instance)
            line.stats.malformed += 1

    def _reset(self, line: Subscription) -> None:
        if line.stream.taken is not None or line.ranks:
            line.stats.resets += 1
        for rank in line.ranks:
            self._receiver.clear(line.source.instance, rank)
        line.ranks.clear()
        line.stream.reset()

    # --- questions ---------------------------------------------------------------------------

    def _check(self, line: Subscription, now: float) -> None:
        """Is what we took last still what it said last, and did anything come since?"""
        line.next_check = now + self._check_s
        if line.source.replay is not None:
            self._ask(
                line,
                ReplayRequest.SNAPSHOT if line.stream.taken is None else ReplayRequest.SINCE,
                now,
            )

    def _ask(
        self, line: Subscription, what: ReplayRequest, now: float, missing: bool = False
    ) -> None:
        line.ask(what, now, self._patience_s, missing=missing)
        line.stats.replays += what is not ReplayRequest.SNAPSHOT

    def _answers(
        self, line: Subscription, dealer: zmq.Socket[bytes], now: float, *, arrived: bool
    ) -> None:
        if not arrived:
            if now >= line.deadline:
                self._silence(line, now)
            return
        line.deadline = now + self._patience_s
        line.silent = 0
        for _ in range(_AT_ONCE):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 4 or len(frames[2]) != SEQ_BYTES:
                line.stats.malformed += 1
                continue
            if frames[2] == END:
                self._ended(line, now)
                return
            self._answer(line, int.from_bytes(frames[2], "big"), frames[3])

    def _answer(self, line: Subscription, seq: int, payload: bytes) -> None:
        stream = line.stream
        first = not line.answered
        line.answered = True
        if line.asked is ReplayRequest.SNAPSHOT:
            if first:
                self._reset(line)
                line.stats.snapshots += 1
                line.stats.partial = False
            self._deliver(line, payload)
            stream.took(seq, None)
            line.progress = True
        elif line.asked is ReplayRequest.ALL and first:
            self._reset(line)
            line.stats.partial = seq > 0
            self._take(line, seq, payload)
            line.progress = line.proved = True
        elif not line.proved:  # the first answer to SINCE
            line.proved = first and stream.same(seq, payload)
        elif stream.taken is not None and seq == stream.taken + 1:
            self._take(line, seq, payload)
            line.progress = True

    def _ended(self, line: Subscription, now: float) -> None:
        """The end of an answer; what it was decides what is asked next."""
        asked, proved, missing = line.asked, line.proved, line.missing
        stuck = missing and not line.progress
        answered = line.answered
        line.hang_up()
        line.next_check = now + self._check_s
        if asked is ReplayRequest.SINCE and (not proved or stuck):
            if not proved:
                line.stats.restarts += 1
            self._ask(line, ReplayRequest.SNAPSHOT, now, missing)
        elif asked is ReplayRequest.SNAPSHOT and not answered:
            self._ask(line, ReplayRequest.ALL, now, missing)
        elif asked is ReplayRequest.ALL and not answered and line.stream.taken is not None:
            self._reset(line)  # it was restarted, and has said nothing yet

    def _silence(self, line: Subscription, now: float) -> None:
        """No answer in time."""
        missing, progress = line.missing, line.progress
        line.hang_up()
        line.silent += 1
        back_off = min(_LONGEST_BACK_OFF_S, self._check_s * 2**line.silent)
        line.next_check = now + (self._check_s if progress else back_off)
        if missing and not progress:
            self._reset(line)
            line.stats.partial = True
            line.stream.reset(anywhere=True)
