"""The command line: one file per command.

Each has ``add_parser(commands)``, which adds its options, and ``run(args)``, which returns the exit
code. torch is imported only in ``run``, so that ``kvkeep --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from kvkeep.cli.drawing import visible
from kvkeep.core.errors import KVKeepError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

COMMANDS = (
    "generate", "serve", "route", "top", "explain", "usage", "tree", "demo", "size", "store",
    "codec", "trace", "replay", "plan", "calibrate", "translate",
)  # fmt: skip
WRONG_INPUT = 2  # as argparse
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvkeep`` with these arguments (default: the process's own); return the exit code.

    A mistake of the user gives one line on stderr and exit code 2.
    """
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except KVKeepError as error:
        line = visible(" ".join(str(error).split()))  # the message may quote a file or a server
        print(f"kvkeep: error: {line}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # stdout is closed (`| head`); drop the buffered output, which would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvkeep",
        description="Keep the KV cache of large language models: no token is ever prefilled twice.",
    )
    parser.add_argument("--version", action="version", version=f"kvkeep {version('kvkeep')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"kvkeep.cli.{name}").add_parser(commands)
    return parser
