"""The command line: one file per command.

Each has ``add_parser(commands)``, which adds its options, and ``run(args)``, which returns the exit
code. torch is imported only in ``run``, so that ``kvkeep --help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

# Nothing else is imported before `main` has taken over Ctrl-C, not even typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.settings import ConfigParser, Parser

__all__ = ["main", "section_parsers"]

COMMANDS = (
    "serve", "route", "top", "explain", "tree", "demo", "size", "store",
    "trace", "replay", "plan", "config", "doctor",
)  # fmt: skip
NO_OUTPUT = 1
WRONG_INPUT = 2  # as argparse
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``kvkeep`` with these arguments (default: the process's own); return the exit code.

    A mistake of the user, or a path that this user must not reach, gives one line on stderr and
    exit code 2; a stdout that takes nothing more gives one line and exit code 1, and none if its
    reader has gone; Ctrl-C gives none and exit code 130.
    """
    takes_over = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if takes_over:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if takes_over:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; during an import end the process, where it may be swallowed."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(arguments: Sequence[str] | None) -> int:
    from kvkeep.cli.drawing import visible  # noqa: PLC0415 - see above
    from kvkeep.cli.tables import OutputFailed, checked_stdout, drop_output  # noqa: PLC0415
    from kvkeep.core.errors import KVKeepError, reason  # noqa: PLC0415

    try:
        with checked_stdout():
            args = _parser().parse_args(arguments)
            code: int = args.run(args)
    except OutputFailed as error:
        print(f"kvkeep: error: cannot write to stdout: {error}", file=sys.stderr)
        drop_output()
        return NO_OUTPUT
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
    except BrokenPipeError:  # stdout is closed, as by `| head`
        drop_output()
        return NO_OUTPUT
    return code


def section_parsers() -> dict[str, ConfigParser]:
    """Return the parsers of the commands that a file of settings has a section for, by its name."""
    _, commands = _built()
    return {one.section: one for one in commands.choices.values() if one.section}


def _parser() -> Parser:
    return _built()[0]


def _built() -> tuple[Parser, Commands]:
    from importlib.metadata import version  # noqa: PLC0415 - see above

    from kvkeep.cli.settings import ConfigParser, Parser  # noqa: PLC0415

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
