"""`import kvkeep`: silent, quick, and without anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import kvkeep

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("torch", "transformers", "rich", "safetensors", "tokenizers", "hypothesis", "asyncio")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_it_is_silent_even_with_all_warnings_on() -> None:
    ran = python("-W", "error", "-c", "import kvkeep")
    assert (ran.stdout, ran.stderr) == ("", "")


def test_it_imports_nothing_heavy_and_no_room_that_needs_an_extra() -> None:
    ran = python("-c", "import sys, kvkeep; kvkeep.PagedCache; print(*sys.modules)")
    loaded = set(ran.stdout.split())
    assert "numpy" in loaded
    assert not loaded.intersection(HEAVY)
    floors = {name.split(".")[1] for name in loaded if name.startswith("kvkeep.")}
    assert floors == {"core"}
    rooms = {name.split(".")[2] for name in loaded if name.startswith("kvkeep.core.")}
    assert rooms <= {
        "cache",
        "errors",
        "events",
        "eviction",
        "extras",
        "keys",
        "pages",
        "prefix",
        "public",
        "returns",
        "slots",
        "tokens",
    }


def test_it_imports_a_name_when_it_is_used() -> None:
    """So that a command begins at once."""
    ran = python("-c", "import sys, kvkeep; print(*sys.modules)")
    loaded = set(ran.stdout.split())
    assert {name for name in loaded if name.startswith("kvkeep")} == {"kvkeep"}


def test_a_store_of_bytes_does_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from kvkeep.store import BlockStore\n"
        f"tiers = ['memory://1MiB', 'file://{tmp_path}/d?size=1MiB']\n"
        "with BlockStore('bytes', tiers=tiers) as store:\n"
        "    assert store.put([b'k' * 32], [b'value'], wait=30) == 1\n"
        "    room = bytearray(5)\n"
        "    assert store.get([b'k' * 32], [memoryview(room)]) == 1 and room == b'value'\n"
    )
    python("-c", program)


def test_it_starts_no_thread_and_changes_no_setting() -> None:
    program = (
        "import numpy, sys, threading, logging, os\n"
        "def settings():\n"
        "    return (threading.active_count(), logging.getLogger().handlers,"
        " logging.getLogger('kvkeep').handlers, logging.getLogger('kvkeep').level,"
        " sys.excepthook, sys.getrecursionlimit(), dict(os.environ), numpy.geterr())\n"
        "before = settings()\n"
        "import kvkeep\n"
        "kvkeep.PagedCache\n"
        "assert settings() == before, (before, settings())\n"
    )
    python("-c", program)


def test_its_share_of_the_import_time_is_small() -> None:
    """NumPy, in the same process, is the measure: what a machine is worth today.

    Of processor time, which others on the machine take from nobody.
    """
    program = (
        "from time import process_time as now\n"
        "begun = now()\n"
        "import numpy\n"
        "between = now()\n"
        "import kvkeep\n"
        "kvkeep.PagedCache\n"
        "print((now() - between) / (between - begun))\n"
    )
    ratios: list[float] = []
    while len(ratios) < 15 and not any(ratio < 1 for ratio in ratios):  # noise can only add
        # The first may have to compile: bytecode is part of any installation.
        ratios.append(float(python("-c", program, PYTHONDONTWRITEBYTECODE="").stdout))
    assert min(ratios) < 1, f"kvkeep and all it imports besides, against NumPy: {ratios}"


def test_the_package_exports_what_it_says() -> None:
    assert sorted(kvkeep.__all__) == list(kvkeep.__all__), "in the order a reader looks for it"
    for name in kvkeep.__all__:
        assert hasattr(kvkeep, name), name
    public = {name for name, value in vars(kvkeep).items()
              if not name.startswith("_") and not isinstance(value, type(sys))}  # fmt: skip
    assert public - set(kvkeep.__all__) <= {"annotations", "TYPE_CHECKING"}


def _without(module: str, program: str) -> str:
    """What ``program`` prints where ``module`` is not installed; `MissingExtra` is printed too."""
    lines = [
        "import sys",
        f"sys.modules[{module!r}] = None",
        "import kvkeep",
        "try:",
        f"    {program}",
        "except kvkeep.MissingExtra as error:",
        "    print(error)",
    ]
    return python("-c", "\n".join(lines)).stdout.strip()


@pytest.mark.parametrize(
    ("module", "program", "extra"),
    [
        ("torch", "import kvkeep.core.pages.tensors", "torch"),
        ("torch", "import kvkeep.serve.engine", "transformers"),
        ("transformers", "from kvkeep.serve.engine import loading; loading.load_config({path!r})",
         "transformers"),
        ("rich", "from kvkeep.core.prefix import render; render.draw('', [])", "cli"),
    ],
)  # fmt: skip
def test_a_missing_package_says_which_extra_brings_it(
    module: str, program: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = _without(module, program.format(path=str(tmp_path)))
    assert said == f"{module} is needed here; install it with: pip install 'kvkeep[{extra}]'"


def test_the_cache_needs_none_of_them() -> None:
    for module in ("torch", "transformers", "rich"):
        said = _without(module, "print(kvkeep.PagedCache(8).open(range(40)).num_tokens)")
        assert said == "40"
