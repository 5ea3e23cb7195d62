"""`FaultProxy`: a TCP proxy that misbehaves on demand."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Final, Literal, NamedTuple, Self

from kvkeep.core.errors import InvalidValue

__all__ = ["FaultProxy"]

Mode = Literal["pass", "refuse", "hang", "cut", "slow", "delay", "replace", "flip"]
Side = Literal["answers", "requests", "both"]

_CHUNK: Final = 256 * 1024
_PATIENCE_S: Final = 10.0
_GLANCE_MS: Final = 50  # interval in which a thread that cannot send checks whether to end
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


class _Fault(NamedTuple):
    """The current fault. Each switch makes a new object; threads compare identities."""

    mode: Mode
    side: Side = "answers"
    amount: float = 0.0  # bytes until the cut, bytes per second, seconds, bytes between flips
    first: int = 0
    text: bytes = b""

    def meets(self, answers: bool) -> bool:
        return self.side == "both" or (self.side == "answers") == answers


class FaultProxy:
    """Forwards connections from a port of its own to ``target``, with faults.

        with FaultProxy(("127.0.0.1", 6379)) as proxy:
            backend = ValkeyBackend.from_url(TierURL(f"valkey://{proxy.address}"))
            proxy.hang()          # from now on, for open connections and for new ones
            ...
            proxy.heal()

    There is one fault at a time. A method switches to it for open and new connections, until the
    next switch. *Answers* are bytes from the target, *requests* bytes to it; positions are counted
    per connection and direction, from the switch or the start of the connection if later.

    ==============  ==============================================================================
    `heal`          everything is forwarded, also what a hang held back
    `refuse`        open connections are reset, connecting fails (ECONNREFUSED)
    `hang`          connections are accepted, nothing is read or answered (like SIGSTOP)
    `cut`           a connection is closed after a number of bytes
    `slow`          bytes per second and connection are limited
    `delay`         each answer begins a number of seconds later
    `replace`       other bytes are forwarded instead of the answer
    `flip`          one bit is inverted in every so many bytes
    `reset`         no mode: closes the open connections with RST
    ==============  ==============================================================================

    Thread safety: all methods. One thread accepts, two serve each connection; `close` ends them.

    Attributes:
        host, port: where it listens, the same in every mode.
        target: (host, port) of the server; may be set, for new connections.
        accepted: connections accepted so far.
        passed: bytes forwarded so far, by "requests" and "answers".
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.accepted = 0
        self.passed = {"requests": 0, "answers": 0}
        self._changed = threading.Condition()
        self._fault = _Fault("pass")
        self._closed = False
        self._pipes: set[_Pipe] = set()
        # This socket keeps the port reserved while none listens and connecting is refused.
        self._holder = _bound(("127.0.0.1", 0))
        self.host, self.port = self._holder.getsockname()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._listen()

    @property
    def address(self) -> str:
        """``host:port``, as in URLs."""
        return f"{self.host}:{self.port}"

    @property
    def mode(self) -> Mode:
        """The current mode."""
        return self._fault.mode

    @property
    def open_connections(self) -> int:
        """Number of connected clients."""
        with self._changed:
            return len({pipe.link for pipe in self._pipes})

    def heal(self) -> None:
        """Forward everything."""
        self._switch(_Fault("pass"))

    def refuse(self) -> None:
        """Reset open connections and refuse new ones."""
        self._switch(_Fault("refuse"))
        self._stop_listening()
        self.reset()

    def hang(self) -> None:
        """Accept connections, but neither read nor answer."""
        self._switch(_Fault("hang", "both"))

    def cut(self, after: int = 0, side: Side = "answers") -> None:
        """Close a connection after ``after`` bytes of ``side``."""
        self._switch(_Fault("cut", _side(side), _at_least(0, "after", after)))

    def slow(self, bytes_per_second: float, side: Side = "both") -> None:
        """Limit the rate, in small pieces."""
        self._switch(
            _Fault("slow", _side(side), _at_least(1, "bytes_per_second", bytes_per_second))
        )

    def delay(self, seconds: float) -> None:
        """Delay the first byte of each answer by ``seconds`` after its request."""
        self._switch(_Fault("delay", "answers", _at_least(0, "seconds", seconds)))

    def replace(self, text: bytes, side: Side = "answers") -> None:
        """Forward ``text`` instead of each chunk received."""
        self._switch(_Fault("replace", _side(side), text=text))

    def flip(self, every: int, first: int = 0, side: Side = "answers") -> None:
        """Invert the lowest bit of the bytes ``first``, ``first + every``, …"""
        self._switch(_Fault("flip", _side(side), _at_least(1, "every", every), first))

    def reset(self) -> None:
        """Close the open connections; clients get ECONNRESET."""
        with self._changed:
            pipes = list(self._pipes)
            for pipe in pipes:
                pipe.link.end()
            self._changed.notify_all()
        for pipe in pipes:
            pipe.join(_PATIENCE_S)

    def close(self) -> None:
        """End all connections and threads and free the port. A second call does nothing."""
        self._closed = True
        self._stop_listening()
        self.reset()
        self._holder.close()

    def _switch(self, fault: _Fault) -> None:
        assert not self._closed, "the proxy is closed"
        with self._changed:
            self._fault = fault
            self._changed.notify_all()
        if fault.mode != "refuse":
            self._listen()

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound((self.host, self.port))
            self._listener.listen(128)
            self._acceptor = threading.Thread(
                target=self._accept, args=(self._listener,), name="proxy accepts", daemon=True
            )
            self._acceptor.start()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()
            assert self._acceptor is not None
            self._acceptor.join(_PATIENCE_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # the listener was closed
            self.accepted += 1
            try:
                server = socket.create_connection(self.target, timeout=_PATIENCE_S)
            except OSError:
                # As a load balancer does whose server is down.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            server.settimeout(None)
            self._start(client, server)

    def _start(self, client: socket.socket, server: socket.socket) -> None:
        link = _Link(client, server)
        pipes = [_Pipe(self, link, answers=False), _Pipe(self, link, answers=True)]
        with self._changed:  # `reset` joins the pipes it finds, so they must be started
            self._pipes.update(pipes)
            for pipe in pipes:
                pipe.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        host, port = self.target
        return f"<FaultProxy {self.address} to {host}:{port}, {self.mode}>"


class _Link:
    """A connection: both sockets, closed when the second of its two pipes ends."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.asked = False  # a request was forwarded and its answer has not begun
        self.ended = False
        self._pipes = 2
        self._lock = threading.Lock()
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def end(self) -> None:
        """Reset both ends as soon as both pipes have ended."""
        self.ended = True
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)  # wakes a thread in recv(), sends nothing to the peer

    def pipe_ended(self) -> None:
        """Close both sockets if both pipes have ended."""
        with self._lock:
            self._pipes -= 1
            if self._pipes == 0:
                self.client.close()
                self.server.close()


class _Pipe(threading.Thread):
    """One direction of one connection."""

    def __init__(self, proxy: FaultProxy, link: _Link, *, answers: bool) -> None:
        super().__init__(name="proxy pipe", daemon=True)
        self.link = link
        self.answers = answers
        self._proxy = proxy
        self._source, self._sink = (
            (link.server, link.client) if answers else (link.client, link.server)
        )
        self._fault = proxy._fault
        self._count = 0  # bytes since that fault began

    def run(self) -> None:
        buffer = bytearray(_CHUNK)
        try:
            while self._step(buffer):
                pass
        except OSError:
            self.link.end()  # one end is closed: close the other
        finally:
            self.link.pipe_ended()
            with self._proxy._changed:
                self._proxy._pipes.discard(self)

    def _step(self, buffer: bytearray) -> bool:
        """Forward one chunk; return False at the end of the stream."""
        self._obey()
        length = self._source.recv_into(buffer)
        self._obey()  # the fault may have been switched during the wait
        if self.link.ended:
            return False
        if not self.answers:
            self.link.asked = True
        elif self.link.asked:
            self.link.asked = False
            if self._fault.mode == "delay":
                self._pause(self._fault.amount)
        if length == 0:
            self._sink.shutdown(socket.SHUT_WR)
            return False
        return self._pass_on(memoryview(buffer)[:length])

    def _obey(self) -> None:
        """Read the current fault, and wait while it is a hang."""
        proxy = self._proxy
        with proxy._changed:
            while True:
                if self._fault is not proxy._fault:
                    self._fault, self._count = proxy._fault, 0
                if self._fault.mode != "hang" or self.link.ended:
                    return
                proxy._changed.wait()

    def _pause(self, seconds: float) -> None:
        """Wait ``seconds``, or until the fault is switched or the connection ends."""
        with self._proxy._changed:
            self._proxy._changed.wait_for(
                lambda: self._fault is not self._proxy._fault or self.link.ended, seconds
            )

    def _pass_on(self, data: memoryview) -> bool:
        fault, start = self._fault, self._count
        self._count += len(data)
        cut = False
        if fault.meets(self.answers):
            if fault.mode == "cut" and self._count >= fault.amount:
                data, cut = data[: max(0, int(fault.amount) - start)], True
            elif fault.mode == "slow":
                data = self._slowly(data)
            elif fault.mode == "replace":
                data = memoryview(fault.text)
            elif fault.mode == "flip":
                every = int(fault.amount)
                behind = max(fault.first - start, (fault.first - start) % every)
                for position in range(behind, len(data), every):
                    data[position] ^= 1
        self._send(data)
        if cut:
            for end in (self._source, self._sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # bytes already sent still arrive, then EOF
        return not cut

    def _slowly(self, data: memoryview) -> memoryview:
        """Send at the rate of the fault; return the rest when the fault was switched."""
        fault = self._fault
        piece = max(1, int(fault.amount / 50))
        while data and self._proxy._fault is fault and not self.link.ended:
            self._pause(len(data[:piece]) / fault.amount)
            self._send(data[:piece])
            data = data[piece:]
        return data

    def _send(self, data: memoryview) -> None:
        """As `socket.sendall`, but return when the connection ends."""
        ready = select.poll()
        ready.register(self._sink, select.POLLOUT)
        while data and not self.link.ended:
            try:
                sent = self._sink.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                ready.poll(_GLANCE_MS)
                continue
            data = data[sent:]
            with self._proxy._changed:
                self._proxy.passed["answers" if self.answers else "requests"] += sent


def _bound(address: tuple[str, int]) -> socket.socket:
    """Bind a socket to ``address`` that allows a second one there."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(address)
    return one


def _side(side: Side) -> Side:
    if side not in {"answers", "requests", "both"}:
        raise InvalidValue(f"side is {side!r}; it is answers, requests or both")
    return side


def _at_least(low: float, name: str, number: float) -> float:
    if isinstance(number, bool) or not number >= low:
        raise InvalidValue(f"{name} is {number!r}; at least {low} is needed")
    return number
