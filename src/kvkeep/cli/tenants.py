"""Options about tenants: the prefixes that all of them share, and their shares of memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import add_path
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import policy
from kvkeep.core.eviction.shares import Shares, check_weights
from kvkeep.core.tokens import common_length

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.serve.engine import Tokenizer

__all__ = ["add_tenant_options", "eviction_of", "public_rows", "weights_in", "weights_of"]

_MOST_BYTES = 1 << 28


def add_tenant_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--public-prefixes`` and ``--share``."""
    add_path(
        parser,
        "--public-prefixes",
        "JSON lines, each a prefix that all tenants share: a text, a list of token ids, or an "
        "object with the first messages of a chat; nothing else is shared between tenants",
    )
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="TENANT=WEIGHT",
        help="share the pool and the tiers fairly, with this weight for a tenant (cache_salt); may "
        "be repeated, others have weight 1; '=1' shares with equal weights (default: no shares)",
    )


def eviction_of(args: argparse.Namespace) -> str | EvictionPolicy:
    """Return the policy of ``--eviction`` and ``--share``. Raises `InvalidValue`."""
    name: str = args.eviction
    weights = weights_of(args)
    return name if weights is None else Shares(lambda: policy(name), weights)


def weights_of(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the weights that ``--share`` gives tenants; None without. Raises `InvalidValue`."""
    if not args.share:
        return None
    return weights_in(args.share)


def weights_in(texts: Sequence[str]) -> dict[str, float]:
    """Return the weights in ``--share`` options, each TENANT=WEIGHT. Raises `InvalidValue`."""
    weights: dict[str, float] = {}
    for text in texts:
        tenant, equals, weight = text.rpartition("=")
        try:
            weights[tenant] = float(weight)
        except ValueError:
            equals = ""
        if not equals:
            raise InvalidValue(f"--share is {text!r}; TENANT=WEIGHT is needed, as team-a=3")
    return check_weights(weights)


def public_rows(file: Path | None, tokenizer: Tokenizer | None) -> list[TokensLike]:
    """Return the prefixes in a file as tokens; `InvalidValue` names the line that is wrong.

    Of messages, all tokens that the chat template puts before the text of a user's message which
    follows them.
    """
    if file is None:
        return []
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read public prefixes from {file}: {error}") from error
    if len(raw) > _MOST_BYTES:
        raise InvalidValue(f"{file} is larger than {_MOST_BYTES >> 20} MiB")
    rows: list[TokensLike] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line), tokenizer))
            except (ValueError, RecursionError) as error:
                raise InvalidValue(f"{file}, line {number}: {error}") from error
    return rows


def _row(told: Any, tokenizer: Tokenizer | None) -> TokensLike:
    if isinstance(told, list):
        return told
    if tokenizer is None:
        raise InvalidValue("the model has no tokenizer; give lists of token ids")
    if isinstance(told, str):
        return tokenizer.encode(told)
    messages = told.get("messages") if isinstance(told, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidValue(
            'a prefix is a text, a list of token ids, or {"messages": [{"role": …, "content": …}]}'
        )
    return _begun(messages, tokenizer)


def _begun(messages: list[dict[str, str]], tokenizer: Tokenizer) -> TokenArray:
    first, second = (
        tokenizer.chat([*messages, {"role": "user", "content": text}]) for text in ("0", "Ay")
    )
    return first[: common_length(first, second)]
