"""The nodes of a Valkey server or cluster: a connection pool for each, and the node of each key.

A cluster spreads 16,384 slots over its nodes; a key's slot is its CRC16
(https://valkey.io/topics/cluster-spec/). A node without the key redirects the client: MOVED
permanently, ASK for one command while the slot migrates.
"""

from __future__ import annotations

import binascii
import re
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from kvkeep.store.backends.valkey.wire import (
    Answer,
    Garbled,
    Lost,
    ServerError,
    TimedOut,
    Wire,
    command,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Address", "Nodes", "Number", "Topology"]

Address = tuple[str, int]
Topology = Literal["yes", "no", "auto"]
Number = int | ServerError
"""The answer to a command that returns a number, or its error."""
T = TypeVar("T")
Dial = Callable[[Address, float], Wire]
"""Connects to a node until a deadline."""

SLOTS: Final = 16384
_FIRST_PAUSE_S: Final = 0.005
_LAST_PAUSE_S: Final = 0.16
"""Seconds to wait after two redirections, then twice as long each time up to the last. While a slot
changes hands, two nodes may each name the other until news of the move has reached both. A node
sends news to one other, chosen at random, once a second: that may take seconds.
"""
_REDIRECTION: Final = re.compile(
    r"(MOVED|ASK) (?P<slot>[0-9]{1,5}) (?P<host>\S*):(?P<port>[0-9]{1,5})", re.ASCII
)
_ASKING: Final = command(b"ASKING")
_BATCH: Final = 1000  # commands sent before their answers are read


class _Pool:
    """``limit`` slots for connections to one node, the last that was used first. Thread-safe."""

    def __init__(self, address: Address, limit: int, dial: Dial) -> None:
        self._address = address
        self._limit = limit
        self._dial = dial
        self._closed = False
        self._slots: LifoQueue[Wire | None] = LifoQueue()  # None: not connected
        for _ in range(limit):
            self._slots.put(None)

    @contextmanager
    def wire(self, deadline: float) -> Iterator[Wire]:
        """Lend a connection to the caller; it is closed after any error but a redirection."""
        try:
            wire = self._slots.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            busy = f"all {self._limit} connections were busy until it timed out"
            raise TimedOut(busy) from None
        reusable = False
        try:
            if self._closed:
                raise Lost("the backend is closed")
            if wire is not None and not wire.usable():  # the server restarted or closed it
                wire.close()
                wire = None
            wire = wire or self._dial(self._address, deadline)
            wire.deadline = deadline
            try:
                yield wire
                reusable = True
            except ServerError as error:
                reusable = _is_redirection(error)
                raise
        finally:
            # After another error an answer may still arrive, which the next user must not read.
            if wire is not None and not (reusable and wire.usable()):
                wire.close()
                wire = None
            self._slots.put(wire)
            if self._closed:
                self.close()

    def close(self) -> None:
        """Close idle connections now, the others when they are returned."""
        self._closed = True
        idle: list[Wire | None] = []
        with suppress(Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for wire in idle:
            if wire is not None:
                wire.close()
            self._slots.put(None)


class Nodes:
    """Sends commands to the node that has the key. Raises `Lost` and `ServerError`.

    The slot map is read at first use, and again after a node was unreachable or a slot had moved.

    Thread safety: all methods. The map is replaced as a whole, so reading it needs no lock.
    """

    def __init__(
        self,
        seed: Address,
        topology: Topology,
        connections: int,
        dial: Dial,
    ) -> None:
        self._seed = seed
        self._topology = topology
        self._connections = connections
        self._dial = dial
        self._lock = threading.Lock()
        self._pools: dict[Address, _Pool] = {}
        self._closed = False
        self._known = [seed]  # nodes to ask for the map, the last that answered first
        self._slots: list[Address | None] | None = None
        self._stale = topology != "no"

    def call(
        self,
        key: bytes,
        parts: Sequence[bytes | memoryview],
        read: Callable[[Wire], T],
        deadline: float,
    ) -> T:
        """Send a command about ``key`` and ``read`` its answer.

        Follows redirections until ``deadline``; raises `TimedOut` if they do not end by then.
        """
        address, asking = self.node_of(key, deadline), False
        redirections, pause = 0, _FIRST_PAUSE_S
        while True:
            if redirections > 1:
                if time.monotonic() + pause >= deadline:
                    raise TimedOut(f"the cluster redirected a command {redirections} times")
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
            try:
                with self.wire(address, deadline) as wire:
                    if asking:
                        wire.send(_ASKING)
                        wire.expect_ok()
                    wire.send(*parts)
                    return read(wire)
            except ServerError as error:
                asking = error.code == "ASK"
                address = self._redirected(error, address)
                redirections += 1

    def call_numbers(
        self, keys: Sequence[bytes], commands: Sequence[Sequence[bytes]], deadline: float
    ) -> list[list[Number]]:
        """Send ``commands[i]`` about ``keys[i]``, pipelined; return their numeric answers."""
        answers: list[list[Number]] = [[] for _ in keys]
        by_node: dict[Address, list[int]] = {}
        for index, key in enumerate(keys):
            by_node.setdefault(self.node_of(key, deadline), []).append(index)
        for address, indices in by_node.items():
            for start in range(0, len(indices), _BATCH):
                batch = indices[start : start + _BATCH]
                with self.wire(address, deadline) as wire:
                    wire.send(b"".join(part for index in batch for part in commands[index]))
                    for index in batch:
                        answers[index] = [_number(wire) for _ in commands[index]]
        for index, key in enumerate(keys):
            if any(map(_is_redirection, answers[index])):
                answers[index] = [
                    self.call(key, [part], _directed_number, deadline) for part in commands[index]
                ]
        return answers

    def node_of(self, key: bytes, deadline: float) -> Address:
        """Return the node that has ``key``; reads the map first if that is needed."""
        slots = self._map(deadline)
        if slots is None:
            return self._seed
        slot = binascii.crc_hqx(key, 0) % SLOTS
        address = slots[slot]
        if address is None:
            self._stale = True
            raise Lost(f"no node of the cluster serves slot {slot}")
        return address

    def known_node_of(self, key: bytes) -> Address | None:
        """Return the node that has ``key``; None for a single server or without a map. No I/O."""
        slots = self._slots
        return None if slots is None else slots[binascii.crc_hqx(key, 0) % SLOTS]

    def primaries(self, deadline: float) -> list[Address]:
        """Return every node that has slots."""
        slots = self._map(deadline)
        return [self._seed] if slots is None else sorted({node for node in slots if node})

    @contextmanager
    def wire(self, address: Address, deadline: float) -> Iterator[Wire]:
        """Lend a connection to that node; see `_Pool.wire`."""
        with self._lock:
            if self._closed:
                raise Lost("the backend is closed")
            if address not in self._pools:
                self._pools[address] = _Pool(address, self._connections, self._dial)
            pool = self._pools[address]
        try:
            with pool.wire(deadline) as wire:
                yield wire
        except Lost:
            self._avoid(address)
            raise

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    def _avoid(self, address: Address) -> None:
        """Note that a node failed: reread the map, from other nodes first, since slots may move."""
        with self._lock:
            self._stale = self._stale or self._slots is not None
            if address in self._known:
                self._known.remove(address)
                self._known.append(address)

    def _redirected(self, error: ServerError, node: Address) -> Address:
        """Return the node that ``error`` redirects to; raise it if it is no redirection."""
        found = _REDIRECTION.fullmatch(str(error))
        if found is None or self._topology == "no":
            raise error
        address = (found["host"] or node[0], int(found["port"]))
        slot = int(found["slot"])
        if error.code == "MOVED" and self._slots is not None and slot < SLOTS:
            self._slots[slot] = address
        self._stale = self._stale or error.code == "MOVED"  # other slots may have moved too
        return address

    def _map(self, deadline: float) -> list[Address | None] | None:
        """Return the slot map, None for a single server; read it if it is stale."""
        if not self._stale:
            return self._slots
        failure: Lost | None = None
        for address in list(self._known):
            try:
                with self.wire(address, deadline) as wire:
                    wire.send(command(b"CLUSTER", b"SLOTS"))
                    answer = wire.answer()
            except Lost as error:
                failure = error
                continue
            self._learn(answer, address)
            return self._slots
        assert failure is not None
        raise failure

    def _learn(self, answer: Answer, node: Address) -> None:
        if isinstance(answer, ServerError):
            if self._topology == "yes" or answer.code not in {"ERR", "NOPERM"}:
                raise answer
            self._slots, self._stale = None, False  # a single server, or CLUSTER is not permitted
            return
        try:
            slots = _slots_of(answer, node)
        except ValueError as error:
            raise Garbled("the server's map of slots cannot be read") from error
        nodes = sorted({one for one in slots if one} | {self._seed})
        with self._lock:
            self._known = [node, *(one for one in nodes if one != node)]
            gone = [self._pools.pop(one) for one in list(self._pools) if one not in nodes]
        self._slots, self._stale = slots, False
        for pool in gone:
            pool.close()


def _slots_of(answer: Answer, node: Address) -> list[Address | None]:
    """Parse the answer to CLUSTER SLOTS: entries of [first, last, [host, port, …], replicas…]."""
    slots: list[Address | None] = [None] * SLOTS
    for entry in answer if isinstance(answer, list) else [answer]:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                # A node that does not know its own address answers an empty one or a "?".
                name = host.decode() if isinstance(host, bytes) and host != b"?" else ""
                slots[first : last + 1] = [(name or node[0], port)] * (last + 1 - first)
            case _:
                raise ValueError
    return slots


def _is_redirection(answer: object) -> bool:
    return isinstance(answer, ServerError) and _REDIRECTION.fullmatch(str(answer)) is not None


def _number(wire: Wire) -> Number:
    answer = wire.answer()
    if not isinstance(answer, int | ServerError):
        raise Garbled(f"the server answered {answer!r:.60} where a number is expected")
    return answer


def _directed_number(wire: Wire) -> Number:
    answer = _number(wire)
    if isinstance(answer, ServerError) and _is_redirection(answer):
        raise answer
    return answer
