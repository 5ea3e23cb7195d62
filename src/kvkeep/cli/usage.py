"""``kvkeep usage``: what each tenant of a running server read, computed and kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import add_json, add_switch
from kvkeep.cli.drawing import amount, visible
from kvkeep.cli.replies import entries, number, text, whole
from kvkeep.cli.server import add_server_arguments, add_server_url, connect
from kvkeep.cli.tables import print_table
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "run"]

_HEAD = (
    "tenant", "requests", "prompts", "read", "computed", "written", "pool", "tiers", "token-h",
)  # fmt: skip
_TOKENS = (
    "prompt_tokens", "read_tokens", "computed_tokens", "written_tokens", "pool_tokens",
    "tier_tokens",
)  # fmt: skip
_COLUMNS = (
    "requests", "prompt_tokens", "read_tokens", "loaded_tokens", "computed_tokens",
    "generated_tokens", "written_tokens", "stored_tokens", "pool_token_seconds",
    "tier_token_seconds", "pool_tokens", "tier_tokens", "pinned_tokens", "retained_tokens",
)  # fmt: skip
_LONGEST = 16


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "usage",
        help="show what each tenant of a running server read, computed and kept",
        description="Show for each tenant (cache_salt) of a running kvkeep server the tokens that "
        "it read from the cache, computed and wrote since the server started, those it keeps now "
        "in pool and tiers, and the tokens kept times how long, in hours. --csv and --json have "
        "more figures, and whole names.",
    )
    add_server_url(parser)
    add_json(parser, "print the server's answer as one JSON object instead of a table")
    add_switch(parser, "--csv", "print comma-separated values, a line for each tenant")
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server, and print its answer."""
    if args.csv and args.json:
        raise InvalidValue("--csv and --json exclude each other: give one of them")
    with connect(args.url, args) as client:
        answer = client.get("/kv/usage")
    rows = entries(answer, "tenants")
    if args.json:
        print(json.dumps(answer))
    elif args.csv:
        from kvkeep.observe.usage.sheet import as_csv  # noqa: PLC0415 - imports NumPy

        print(as_csv(_line(answer, row) for row in rows), end="")
    else:
        print_table(_HEAD, [_cells(row) for row in rows if _counts(row)])
    return 0


def _line(answer: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a tenant, as the server's own sheet has it."""
    salt = row.get("cache_salt")
    times = {name: number(answer, name) for name in ("since", "until")}
    named = {"others": salt is None, "cache_salt": None if salt is None else visible(str(salt))}
    return {
        "model": text(answer, "model"),
        **times,
        **named,
        **{name: number(row, name) for name in _COLUMNS},
    }


def _counts(row: Mapping[str, Any]) -> bool:
    """Whether a row has anything; that of all others is often empty."""
    return row.get("cache_salt") is not None or any(whole(row, name) for name in _TOKENS)


def _cells(row: Mapping[str, Any]) -> list[str]:
    salt = row.get("cache_salt")
    name = "(others)" if salt is None else visible(str(salt)) or "(none)"
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 1]}…"
    hours = sum(number(row, f"{place}_token_seconds") or 0 for place in ("pool", "tier")) / 3600
    tokens = [amount(whole(row, field)) for field in _TOKENS]
    return [name, amount(whole(row, "requests")), *tokens, _hours(hours)]


def _hours(hours: float) -> str:
    return amount(round(hours)) if hours >= 10 else f"{hours:.2f}"
