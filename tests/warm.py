"""Processes that start at once: forks of one that has imported what takes seconds.

Importing torch and Transformers costs more than most of what a test of the command line does.
`Popen` and `run` are those of `subprocess`, for commands that begin with `PYTHON`: the process is
forked from one that was started so and has imported them. It has its own arguments, environment,
directory and files, is our child, and ends as Python ends. A test whose subject is the start
itself, what is imported, or a variable that is read while importing, starts a process as usual.

Run as a script it is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from typing import Any

PRELOADED = (
    "kvkeep.cli", "kvkeep.cli.demo", "kvkeep.cli.serve",
    "kvkeep.serve.engine", "kvkeep.serve.server", "kvkeep.serve.server.app", "kvkeep.store",
    "kvkeep.integrations.transformers",
    "torch", "transformers.models.llama.modeling_llama", "transformers.generation.utils",
    "tokenizers", "uvicorn", "httpx",
)  # fmt: skip
PYTHON = (sys.executable, "-W", "error")
KVKEEP = (*PYTHON, "-m", "kvkeep")
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20

_lock = threading.Lock()


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks a warm process instead of executing a new one."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        told = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments, **named)
        given = told.arguments
        words = list(map(os.fspath, given["args"]))
        assert tuple(words[:3]) == PYTHON, f"only {PYTHON} is kept warm, not {words}"
        assert not given["shell"]
        assert given["preexec_fn"] is None
        files = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        message = json.dumps({
            "words": words[3:],
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "session": bool(given["start_new_session"]),
        })  # fmt: skip
        try:
            self.pid = _forked(message, [own if fd == -1 else fd for own, fd in enumerate(files)])
            self._child_created = True
        finally:
            self._close_pipe_fds(
                *(given[name] for name in (
                    "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite",
                ))
            )  # fmt: skip


def run(*arguments: Any, **named: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with a warm process."""
    if named.pop("capture_output", False):
        named["stdout"] = named["stderr"] = subprocess.PIPE
    timeout, check = named.pop("timeout", None), named.pop("check", False)
    typed = named.pop("input", None)
    if typed is not None:
        named["stdin"] = subprocess.PIPE
    with Popen(*arguments, **named) as process:
        try:
            out, err = process.communicate(typed, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _forked(message: str, files: list[int]) -> int:
    """Have a process forked that becomes our child; its id."""
    with _lock:
        parent = _started()
        _adopt(True)
        try:
            socket.send_fds(parent, [message.encode()], files)
            answer = parent.recv(64)
        finally:
            _adopt(False)
    assert answer, "the process that forks the others is gone"
    return int(answer)


def _adopt(adopting: bool) -> None:
    """Whether processes below us whose parent ends become our children."""
    done = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopting), 0, 0, 0)
    assert done == 0, os.strerror(ctypes.get_errno())


@cache
def _started() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    with theirs:
        process = subprocess.Popen(
            [*PYTHON, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- the process that forks ----------------------------------------------------------------------


def _fork_on_demand(asked: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return None at their end, and in a forked process its request."""
    while True:
        message, files, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 3)
        if not message:
            return None
        reader, writer = os.pipe()
        between = os.fork()
        if between:
            os.close(writer)
            pid = os.read(reader, 64)
            os.close(reader)
            os.waitpid(between, 0)  # from here on the other is the child of who asked
            for fd in files:
                os.close(fd)
            asked.send(pid)
            continue
        if pid := os.fork():
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        asked.close()
        job: dict[str, Any] = json.loads(message)
        for own, fd in enumerate(files):
            os.dup2(fd, own)
        for fd in set(files) - {0, 1, 2}:
            os.close(fd)
        return job


def _become(job: dict[str, Any]) -> None:
    """Be that process, to its end."""
    if job["session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.stdin = _text(0, "r")
    sys.stdout = sys.__stdout__ = _text(1, "w")
    sys.stderr = sys.__stderr__ = _text(2, "w")
    first, *others = job["words"]
    if first == "-m":
        sys.path[0] = os.getcwd()
        module, *others = others
        sys.argv = [module, *others]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = ""
        code, *others = others
        sys.argv = ["-c", *others]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")


def _text(fd: int, mode: str) -> io.TextIOWrapper:
    file = open(fd, f"{mode}b", closefd=False)  # noqa: SIM115 - as long as the process
    return io.TextIOWrapper(
        file, "utf-8", "backslashreplace" if fd == 2 else "strict",
        line_buffering=fd == 2 or os.isatty(fd),
        write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
    )  # fmt: skip


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        __import__(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    gc.collect()
    gc.freeze()
    wanted = _fork_on_demand(channel)
    if wanted is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(wanted)
