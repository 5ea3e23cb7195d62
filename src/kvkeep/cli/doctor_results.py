"""`CheckResult`: the result of one check of ``kvkeep doctor``, as a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CheckResult", "fail", "ok", "warn"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        state: "ok", "warn" or "fail".
        check: what was checked: "options", "access", "space", "speed", "limits", "versions".
        about: the tier or the setting, without secrets.
        found: what was found.
        todo: what to do about it; empty if there is nothing to do.
    """

    state: Literal["ok", "warn", "fail"]
    check: str
    about: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<4}  {self.check:<8}  {self.about}: {self.found}"
        return " ".join(line.split("\n")) + (f". To do: {self.todo}" if self.todo else "")


def ok(check: str, about: str, found: str) -> CheckResult:
    """Return the result that all is well."""
    return CheckResult("ok", check, about, found)


def warn(check: str, about: str, found: str, todo: str) -> CheckResult:
    """Return a result that costs something, and prevents nothing."""
    return CheckResult("warn", check, about, found, todo)


def fail(check: str, about: str, found: str, todo: str = "") -> CheckResult:
    """Return a result with which kvkeep does not start, or keeps nothing there."""
    return CheckResult("fail", check, about, found, todo)
