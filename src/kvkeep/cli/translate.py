"""``kvkeep translate``: a configuration of LMCache, option by option in kvkeep's words."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_json, add_option, count
from kvkeep.cli.drawing import visible
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvkeep.cli.arguments import Commands
    from kvkeep.integrations.lmcache import Translated, Translation

__all__ = ["add_parser", "run"]

_VLLM = {
    "kv_connector": "KVKeepConnector",
    "kv_connector_module_path": "kvkeep.integrations.vllm",
}
_SGLANG = {
    "backend_name": "kvkeep",
    "module_path": "kvkeep.integrations.sglang",
    "class_name": "KVKeepStorage",
    "interface_v1": 1,
}
FATES = ("translated", "no counterpart", "unknown", "not needed")
_SGLANG_HAS = ("tiers", "load_timeout", "lookup_timeout")


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "translate",
        help="a configuration of LMCache in kvkeep's words",
        description="Read a configuration of LMCache 0.5 and print what to give vLLM or SGLang for "
        "kvkeep, and what became of each option. Nothing is opened or written.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        help="YAML file of LMCache, or vLLM's --kv-transfer-config with its connector, as JSON or "
        "a file (default: the file that LMCACHE_CONFIG_FILE names). Variables LMCACHE_… replace "
        "what the file has",
    )
    add_option(parser, "--tp RANKS", "tensor-parallel ranks on a machine", type=count, default=1)
    parser.add_argument(
        "--engine", choices=["vllm", "sglang"], default="vllm", help="(default: vllm)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the translation: to be pasted on standard output, the table beside it."""
    from kvkeep.integrations.lmcache import translate  # noqa: PLC0415 - not for `kvkeep --help`
    from kvkeep.integrations.lmcache_given import gather  # noqa: PLC0415

    whole("--tp", args.tp, 1)
    given = gather(args.file, os.environ)
    if not given.options:
        where = args.file or os.environ.get("LMCACHE_CONFIG_FILE") or "variables LMCACHE_…"
        raise InvalidValue(f"no options of LMCache in {where}")
    found = translate(given.options, ranks=args.tp)
    engine, left_out = _for_engine(args.engine, found, given.role)
    if args.json:
        names = ("option", "given", "fate", "note")
        rows = [dict(zip(names, row, strict=True)) for row in found.rows]
        said = {"engine": args.engine, "config": engine, "left_out": left_out, "options": rows}
        print(json.dumps(said, indent=1))
        return 0
    for line in _told(found.rows):
        print(line)
    if args.engine == "vllm":
        print("\nvllm serve MODEL --shutdown-timeout 20 --kv-transfer-config \\")
    else:
        print("\npython -m sglang.launch_server --enable-hierarchical-cache \\")
        print("  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \\")
    print(f"  {shlex.quote(json.dumps(engine))}")
    if given.inside:
        print("\nPut it in place of LMCache's entry in MultiConnector, whose outer configuration "
              'needs "kv_load_failure_policy": "recompute".')  # fmt: skip
    if left_out:
        print(f"\nSGLang's storage backend has no option {', '.join(left_out)}.")
    print("\nThe tiers begin empty: what LMCache has stored is not read.")
    return 0


def _told(rows: Sequence[Translated]) -> Iterator[str]:
    """Yield lines: the options by what became of them."""
    width = shutil.get_terminal_size().columns
    for fate in FATES:
        mine = [row for row in rows if row.fate == fate]
        if mine:
            yield f"{fate}:"
        for row in mine:
            yield visible(f"  {row.option}: {row.given}")
            yield from textwrap.wrap(
                visible(row.note), max(40, width),
                initial_indent="      ", subsequent_indent="      ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip


def _for_engine(engine: str, found: Translation, role: str) -> tuple[dict[str, object], list[str]]:
    """Return what to give the engine, and the options that it does not have."""
    if engine == "vllm":
        return {**_VLLM, "kv_role": role, "kv_connector_extra_config": found.options}, []
    taken = {key: value for key, value in found.options.items() if key in _SGLANG_HAS}
    return {**_SGLANG, **taken}, [key for key in found.options if key not in taken]
