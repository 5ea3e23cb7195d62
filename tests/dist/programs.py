"""Run programs, the arguments, one after the other; print what each raised, or null, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback


def said_by(program: str) -> str | None:
    """The error that ``program`` ends with, as the last lines of its traceback say it."""
    try:
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
            exec(program, {"__name__": "program"})
    except BaseException as error:  # noqa: BLE001 - whatever it is, a test reads it
        said = traceback.format_exc()
        if said.count("Traceback (most recent call last)") > 1:
            return said  # a user would read of several errors
        return "".join(traceback.format_exception_only(error)).strip()
    return None


def main() -> None:
    """Programs find a key file by the name ``KEY``."""
    with tempfile.NamedTemporaryFile() as key:
        key.write(bytes(32))
        key.flush()
        programs = [program.replace("{KEY}", key.name) for program in sys.argv[1:]]
        json.dump([said_by(program) for program in programs], sys.stdout)


if __name__ == "__main__":
    main()
