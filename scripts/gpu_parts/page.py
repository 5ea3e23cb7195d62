"""The page of Markdown from what all parts found. Needs no torch: it is written after each part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COMMAND", "page", "wrong"]

COMMAND = "python scripts/gpu_proof.py"

_HEAD = """# Proof on a GPU

<!-- Written by scripts/gpu_proof.py; do not edit. -->

`{command}` runs what needs a GPU and cannot be shown without one: the tests marked
`cuda`, the time to the first token, decoding, copies and attention, each beside what the hardware
or PyTorch does without kvkeep. It needs this repository, and an image with PyTorch and CUDA; no
network, nothing is installed, and it takes at most ten minutes. Each part is a process with a
deadline: one that fails or hangs does not take the others with it, and this page and
[the same as JSON](gpu-proof.json) are written after each.

```sh
{command}                       # on a GPU; writes docs/gpu-proof.md and .json
{command} --device cpu --small  # the script itself, without a GPU, in two minutes
{command} --only first_token decode --out build/proof --disk /mnt/nvme
```

Where Transformers or xxhash is missing, the engine and the store are left out; without pytest and
hypothesis, the tests; the page says so. A folder made elsewhere with the same version of Python by
`pip install --target packages transformers xxhash pytest hypothesis` brings them:
`PYTHONPATH=packages {command}`.
"""
_CPU = """
**This page was written on a CPU.** The figures show that the script runs, and that its checks hold.
"The device" is memory of the host here, nothing is pinned, and the model is small.
"""


def page(found: Mapping[str, Any]) -> str:
    """Return the page."""
    parts: Mapping[str, Any] = found["parts"]
    facts: Mapping[str, str] = parts.get("machine", {}).get("facts", {})
    name = facts.get("GPU") or facts.get("processor") or "not told"
    text = _HEAD.format(command=COMMAND)
    if found["device"].startswith("cpu"):
        text += _CPU
    size = "" if found["size"] == "full" else f" --{found['size']}"
    text += f"\n**{name}**, {found['date']}, `--device {found['device']}{size}`. "
    text += "A ratio is the\nmedian over the rounds, to the first line of its case; above 1 is "
    text += "better.\n"
    text += "\n| part | outcome | seconds |\n|---|---|--:|\n"
    for part in parts.values():
        text += f"| {part['title']} | {_outcome(part)} | {part['seconds']:.0f} |\n"
    for key, part in parts.items():
        text += f"\n## {part['title']}\n"
        for note in part["notes"]:
            text += f"\n{note}\n"
        if part["skipped"]:
            text += "\n" + "".join(f"- Not run: {_cell(reason)}\n" for reason in part["skipped"])
        if key == "machine":
            text += "\n| | |\n|---|---|\n"
            text += "".join(f"| {_cell(what)} | {_cell(is_)} |\n" for what, is_ in facts.items())
        elif part["rows"]:
            text += "\n" + _table(part["rows"])
        if part["error"]:
            text += f"\nIt ended early: {_cell(part['error'])}\n"
    return text


def wrong(part: Mapping[str, Any]) -> list[str]:
    """Return the names of the checks of a part that failed."""
    return [f"{row['case']}, {row['name']}" for row in part["rows"] if row["right"] is False]


def _outcome(part: Mapping[str, Any]) -> str:
    said = []
    if part["status"] == "skipped":
        said.append("not run")
    elif part["status"] != "done":
        said.append(f"**{part['status']}**")
    checks = [row["right"] for row in part["rows"] if row["right"] is not None]
    if checks:
        said.append(f"{sum(checks)} of {len(checks)} checks hold")
    return ", ".join(said) or "done"


def _table(rows: list[Mapping[str, Any]]) -> str:
    measured = any(row["values"] for row in rows)
    head = "| case | | median | all rounds | ratio | check | |\n|---|---|--:|--:|--:|---|---|\n"
    text = head if measured else "| case | | check | |\n|---|---|---|---|\n"
    case = ""
    for row in rows:
        values, ratio = row["values"], row["ratio"]
        shown = "" if row["case"] == case else row["case"]
        case = row["case"]
        if not measured:
            cells = [shown, row["name"], _check(row), row["note"]]
            text += f"| {' | '.join(map(_cell, cells))} |\n"
            continue
        median = f"{_number(row['median'])} {row['unit']}" if values else ""
        spread = f"{_number(min(values))} … {_number(max(values))}" if values else ""
        times = f"{ratio:.2f}×" if ratio is not None else ""
        cells = [shown, row["name"], median, spread, times, _check(row), row["note"]]
        text += f"| {' | '.join(map(_cell, cells))} |\n"
    return text


def _check(row: Mapping[str, Any]) -> str:
    return {True: "✓", False: "**✗**", None: ""}[row["right"]]


def _number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _cell(text: str) -> str:
    """Return text that neither ends a cell nor begins a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
