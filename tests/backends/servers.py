"""Real Valkey or Redis servers for tests: on ports of their own, ended by process id.

    with server() as one: …                       plain
    with server(password="p", tls=tmp_path) as one: …
    with cluster(3) as nodes: …

Also the same exchange over a bare socket, to compare with: `raw_set` and `raw_get`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0
PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(
    PROGRAM is None, reason="neither valkey-server nor redis-server is on the PATH"
)


@dataclass
class Certificates:
    """Files of one authority and what it signed for 127.0.0.1 and localhost."""

    ca: Path
    cert: Path
    key: Path


@dataclass
class Server:
    """A running server; ``port`` stays the same when it is killed and started again."""

    directory: Path
    port: int
    password: str | None = None
    certificates: Certificates | None = None
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        """Without options."""
        scheme = "valkeys" if self.certificates else "valkey"
        who = f":{self.password}@" if self.password else ""
        return f"{scheme}://{who}127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert PROGRAM is not None
        assert self.process is None
        port = ["--port", str(self.port)]
        if self.certificates:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "optional"]
            port += ["--tls-ca-cert-file", str(self.certificates.ca)]
            port += ["--tls-cert-file", str(self.certificates.cert)]
            port += ["--tls-key-file", str(self.certificates.key)]
        self.process = subprocess.Popen(
            [PROGRAM, *port, "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "",
             "--logfile", "log", "--daemonize", "no", *self._secret(), *self.options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self.process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)

    def freeze(self) -> None:
        """Let it hang: it accepts connections and answers nothing. `stop` ends that too."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """As `kill -9` does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it, also if it hangs."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self._end(signal.SIGTERM)

    def ask(self, *words: str | bytes) -> bytes:
        """Send one command on a new connection; return the first line of the answer, or a value."""
        with self.connect() as wire:
            wire.sendall(packed(words))
            line = read_line(wire)
            if line.startswith(b"$") and line != b"$-1":
                return read_exactly(wire, int(line[1:]))
            return line

    def connect(self) -> socket.socket:
        """A plain socket, already authenticated."""
        wire: socket.socket = socket.create_connection(self.address, PATIENCE_S)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.certificates:
            context = ssl.create_default_context(cafile=str(self.certificates.ca))
            wire = context.wrap_socket(wire, server_hostname="127.0.0.1")
        if self.password:
            wire.sendall(packed(["AUTH", self.password]))
            assert read_line(wire) == b"+OK"
        return wire

    def _secret(self) -> list[str]:
        return ["--requirepass", self.password] if self.password else []

    def _answers(self) -> bool:
        try:
            return self.ask("PING") == b"+PONG"
        except OSError:
            return False

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is not None:
            os.kill(process.pid, how)
            process.wait(PATIENCE_S)


@contextmanager
def server(
    *options: str, password: str | None = None, certificates: Certificates | None = None
) -> Iterator[Server]:
    """Start one server with further options ("--maxmemory", "64mb"); skips where there is none."""
    if PROGRAM is None:
        pytest.skip(needs_server.kwargs["reason"])
    with tempfile.TemporaryDirectory(prefix="kvkeep-valkey-") as directory:
        one = Server(Path(directory), free_port(), password, certificates, options)
        try:
            one.start()
            yield one
        finally:
            one.stop()


@contextmanager
def cluster(masters: int) -> Iterator[list[Server]]:
    """Start a cluster without replicas; each has an equal part of the slots, in order."""
    with ExitStack() as stack:
        nodes = []
        for _ in range(masters):
            bus = str(free_port())
            options = ("--cluster-enabled", "yes", "--cluster-port", bus)
            nodes.append(stack.enter_context(server(*options)))
        for number, node in enumerate(nodes):
            first, last = 16384 * number // masters, 16384 * (number + 1) // masters - 1
            assert node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"+OK"
            bus = node.options[-1]
            for other in nodes:
                met = other.ask("CLUSTER", "MEET", "127.0.0.1", str(node.port), bus)
                assert met == b"+OK"
        come_together(nodes)
        yield nodes


def come_together(nodes: list[Server]) -> None:
    """Wait until every node serves its slots."""
    end = time.monotonic() + PATIENCE_S
    while not all(_agrees(node, len(nodes)) for node in nodes):
        assert time.monotonic() < end, "the cluster does not come together"
        time.sleep(0.02)


def _agrees(node: Server, masters: int) -> bool:
    info = node.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_size:%d" % masters in info


def make_certificates(directory: Path) -> Certificates:
    """Make an authority, and a certificate for 127.0.0.1 that it signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def made(
        subject: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
    ) -> x509.Certificate:
        now = datetime.now().astimezone()
        ours = key is signer
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ours, path_length=None), critical=True)
        )
        if not ours:
            address = x509.IPAddress(ip_address("127.0.0.1"))
            names = x509.SubjectAlternativeName([address, x509.DNSName("localhost")])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(signer, hashes.SHA256())

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    pem = serialization.Encoding.PEM
    files = Certificates(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    files.ca.write_bytes(made("authority", authority, authority).public_bytes(pem))
    files.cert.write_bytes(made("127.0.0.1", key, authority).public_bytes(pem))
    plain = serialization.NoEncryption()
    files.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files


# --- the bare protocol -----------------------------------------------------------------------


def packed(words: list[str | bytes] | tuple[str | bytes, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = word.encode() if isinstance(word, str) else word
        parts.append(b"$%d\r\n%s\r\n" % (len(text), text))
    return b"".join(parts)


def read_line(wire: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        byte = wire.recv(1)
        if not byte:
            raise ConnectionResetError("the server hung up")
        line += byte
    return line[:-2]


def read_exactly(wire: socket.socket, length: int) -> bytes:
    out = bytearray(length + 2)
    read_into(wire, memoryview(out))
    return bytes(out[:-2])


def read_into(wire: socket.socket, out: memoryview) -> None:
    known = 0
    while known < len(out):
        length = wire.recv_into(out[known:])
        if length == 0:
            raise ConnectionResetError("the server hung up")
        known += length


def raw_set(wire: socket.socket, name: bytes, value: memoryview) -> None:
    """SET at the speed of a socket: the baseline for a backend's put."""
    wire.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(value)))
    wire.sendall(value)
    wire.sendall(b"\r\n")
    assert read_line(wire) == b"+OK"


def raw_get(wire: socket.socket, name: bytes, out: memoryview) -> None:
    """GET of a value of ``len(out) - 2`` bytes into ``out``: the baseline for a get."""
    wire.sendall(packed([b"GET", name]))
    assert read_line(wire) == b"$%d" % (len(out) - 2)
    read_into(wire, out)
