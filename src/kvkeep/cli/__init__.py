"""The command line: one file per command.

Each has ``add_parser(commands)``, which adds its options, and ``run(args)``, which returns the exit
code. torch is imported only in ``run``, so that ``kvkeep --help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from kvkeep.cli.drawing import visible
from kvkeep.cli.parsing import Parser
from kvkeep.cli.settings import ConfigParser
from kvkeep.core.errors import KVKeepError, reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.cli.arguments import Commands

__all__ = ["main", "section_parsers"]

COMMANDS = (
    "serve", "route", "top", "explain", "usage", "tree", "demo", "size", "store",
    "trace", "replay", "plan", "config", "doctor",
)  # fmt: skip
WRONG_INPUT = 2  # as argparse
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvkeep`` with these arguments (default: the process's own); return the exit code.

    A mistake of the user, or a path that this user must not reach, gives one line on stderr and
    exit code 2.
    """
    try:
        args = _parser().parse_args(arguments)
        code: int = args.run(args)
    except KVKeepError as error:
        line = visible(" ".join(str(error).split()))  # the message may quote a file or a server
        print(f"kvkeep: error: {line}", file=sys.stderr)
        return WRONG_INPUT
    except PermissionError as error:
        if error.filename is None:
            raise
        line = visible(f"{error.filename}: {reason(error)}")
        print(f"kvkeep: error: {line}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # stdout is closed (`| head`); drop the buffered output, which would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def section_parsers() -> dict[str, ConfigParser]:
    """Return the parsers of the commands that a file of settings has a section for, by its name."""
    _, commands = _built()
    return {one.section: one for one in commands.choices.values() if one.section}


def _parser() -> Parser:
    return _built()[0]


def _built() -> tuple[Parser, Commands]:
    parser = Parser(
        prog="kvkeep",
        description="Keep the KV cache of large language models: no token is ever prefilled twice.",
    )
    parser.add_argument("--version", action="version", version=f"kvkeep {version('kvkeep')}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=ConfigParser
    )
    for name in COMMANDS:
        importlib.import_module(f"kvkeep.cli.{name}").add_parser(commands)
    return parser, commands
