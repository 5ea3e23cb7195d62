"""Prove kvkeep on a GPU, in one unattended run of at most ten minutes.

    python scripts/gpu_proof.py                       # on the GPU
    python scripts/gpu_proof.py --device cpu --small  # the script itself, in two minutes

Needs an image with PyTorch, and this repository; no network, and nothing is installed. Each part
runs in a process of its own, with a deadline: one that hangs or fails does not take the others with
it. After each part ``gpu-proof.json`` and ``gpu-proof.md`` are written to ``--out``, or to a
temporary folder where that cannot be written. The exit code is 1 if a part failed, was too slow, or
has a check that does not hold.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

HOME = Path(__file__).resolve().parents[1]
# The parts, kvkeep, and `waiting_loads`, wherever the script is called from.
sys.path[:0] = [str(HOME / name) for name in ("src", "scripts", "tests")]

from gpu_parts.page import page, wrong  # noqa: E402 - behind the paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_parts.figures import SizeName

__all__ = ["PARTS", "Part", "main", "run_part"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part: the module that has its ``run``, its title, and its deadline in seconds."""

    module: str
    title: str
    deadline: float


PARTS = {
    # The first to import torch, from a disk that may be cold.
    "machine": Part("machine", "The machine", 70),
    "agreement": Part("agreement", "The same as on a CPU", 40),
    "tests": Part("suite", "Tests marked `cuda`", 140),
    "first_token": Part("first_token", "Time to the first token", 160),
    "decode": Part("decode", "Decoding with and without a store", 60),
    "copies": Part("copies", "Copies", 50),
    "attention": Part("attention", "Attention over pages", 50),
    "passes": Part("passes", "What a pass takes", 30),
}
_ALL_S = 570.0  # for all parts: ten minutes, less what ends and writes
_KILLED_S = 5.0  # a process that hangs in the driver may not end even when killed
_TOLD = 400  # characters of an error
_READ = 1 << 16  # bytes of a log's end
_ROOM = 1 << 20  # bytes that must fit where results are written
_STOP = threading.Event()  # a signal has asked for the end


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts and write what they found; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, …, or cpu")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="a small model, for a CPU")
    size.add_argument("--smallest", action="store_true", help="in seconds, for the script's test")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, default=HOME / "docs", help="folder of the results")
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure; else temporary")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    size_name: SizeName = "smallest" if options.smallest else "small" if options.small else "full"
    if options.child:
        name, file = options.child
        return _child(PARTS[name], Path(file), options.device, size_name, options.disk)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(), "device": options.device, "size": size_name,
        "parts": {},
    }  # fmt: skip
    notes = _first_with_room(Path(tempfile.gettempdir()), options.out, Path("/dev/shm"))
    disk = _first_with_room(options.disk or notes, notes)
    out = _first_with_room(options.out, notes)
    for given, taken in ((options.out, out), (options.disk or notes, disk)):
        if given != taken:
            print(f"nothing can be written to {given}; it goes to {taken}", flush=True)
    ends = monotonic() + _ALL_S
    failed = False
    for name in dict.fromkeys(["machine", *options.only]):
        print(f"… {PARTS[name].title}", flush=True)
        # A full disk is to fail what is measured on it, not to hide what was found.
        with _temporary(notes) as folder, _temporary(disk) as data:
            command = [
                sys.executable, str(Path(__file__).resolve()), "--device", options.device,
                "--disk", data, "--child", name, f"{folder}/found.json",
            ]  # fmt: skip
            if size_name != "full":
                command.append(f"--{size_name}")
            deadline = min(PARTS[name].deadline, ends - monotonic())
            part = run_part(command, Path(folder), deadline)
        part = {"title": PARTS[name].title} | part
        found["parts"][name] = part
        try:
            _write(out, found)
        except OSError as error:
            print(f"  not written: {error}", flush=True)
            failed = True
        bad = wrong(part)
        failed |= part["status"] not in ("done", "skipped") or bool(bad)
        print(f"  {part['status']} in {part['seconds']:.0f} s {part['error']}", flush=True)
        for reason in part["skipped"]:
            print(f"  not run: {reason}", flush=True)
        for check in bad:
            print(f"  does not hold: {check}", flush=True)
        if _STOP.is_set() or (name == "machine" and part["status"] == "failed"):
            break  # there is no such device
    print(f"written: {out / 'gpu-proof.md'}")
    return int(failed)


def _first_with_room(*folders: Path) -> Path:
    """Return the first folder in which a megabyte can be written; the first one if there is none.

    Makes folders that are missing.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_ROOM))
        except OSError:
            continue
        return folder
    return folders[0]


def _temporary(folder: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        dir=folder, prefix="kvkeep-proof-", ignore_cleanup_errors=True
    )


def run_part(command: Sequence[str], folder: Path, deadline: float) -> dict[str, Any]:
    """Run a part's process, which writes ``found.json`` in ``folder``; return what it found.

    Kills it, and all that it started, after ``deadline`` seconds. What it had found by then stays.
    ``status`` is "done", "skipped", "failed" or "too slow".
    """
    nothing: dict[str, Any] = {"rows": [], "notes": [], "skipped": [], "facts": {}}
    if deadline <= 0:
        return nothing | {"status": "too slow", "error": "no time was left for it", "seconds": 0.0}
    began, error = monotonic(), ""
    log = folder / "log"
    with log.open("wb") as said:
        # A group of its own: pytest and its children end with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            env=os.environ | {"KVKEEP_PROOF_DEADLINE": str(deadline)},
        )  # fmt: skip
        try:
            while (code := _ended(process)) is None and monotonic() < began + deadline:
                if _STOP.is_set():
                    break
            status = "too slow" if code is None else {0: "done", 3: "skipped"}.get(code, "failed")
            if _STOP.is_set():
                status, error = "failed", "the script was ended by a signal"
            elif status == "too slow":
                error = f"it took more than {deadline:.0f} s; {_last(log)}"
            elif status == "failed":
                error = f"exit code {code}: {_last(log)}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
    file = folder / "found.json"
    found = json.loads(file.read_text()) if file.exists() else nothing
    return found | {"status": status, "error": error, "seconds": monotonic() - began}


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Wait a moment for a process; return its exit code, or None if it still runs."""
    try:
        return process.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def _last(log: Path) -> str:
    """Return the end of what a process said, in one line; of a hang, the innermost calls."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _READ))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    hangs = [at for at, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if hangs:  # the main thread is the last one
        return " ".join(" ".join(lines[hangs[-1] + 1 :]).split())[:_TOLD]
    return " ".join(" ".join(lines[-12:]).split())[-_TOLD:]


def _child(part: Part, file: Path, device: str, size: SizeName, folder: Path) -> int:
    """Run one part in this process; return 0, or 3 if all of it was skipped."""
    deadline = float(os.environ.get("KVKEEP_PROOF_DEADLINE", "600"))
    faulthandler.dump_traceback_later(max(1.0, deadline - 2), exit=False)  # tells where it hangs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(int(deadline) + 10)  # ends this process if the one that kills it is gone
    import torch  # noqa: PLC0415 - seconds, and not needed where parts are started
    from gpu_parts.figures import Report, Setting, Skipped  # noqa: PLC0415 - they need torch

    from kvkeep.serve.engine.loading import pick_device  # noqa: PLC0415

    torch.set_grad_enabled(False)
    report = Report(file)
    try:
        setting = Setting(pick_device(device), size, folder)
        if setting.on_gpu:
            torch.cuda.set_device(setting.device)  # what names no device means this one
        import_module(f"gpu_parts.{part.module}").run(report, setting)
    except Skipped as reason:
        report.skip(str(reason))
        return 0 if report.rows else 3
    return 0


def _write(folder: Path, found: dict[str, Any]) -> None:
    """Write both files, each at once."""
    for name, text in (
        ("gpu-proof.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n"),
        ("gpu-proof.md", page(found)),
    ):
        new = folder / f".{name}.new"
        new.write_text(text, "utf-8")
        os.replace(new, folder / name)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: _STOP.set())  # what runs then is killed, too
    sys.exit(main())
