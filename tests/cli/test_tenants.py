"""``--share`` and ``--public-prefixes``: what they read, and what they refuse."""

from __future__ import annotations

import argparse

import pytest

from kvkeep import InvalidValue
from kvkeep.cli.serve_options import add_tenant_options, eviction_of
from kvkeep.core.eviction.shares import Shares


def parsed(*options: str, eviction: str = "lru") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--eviction", default=eviction)
    add_tenant_options(parser)
    return parser.parse_args(options)


def test_without_shares_it_is_the_named_policy() -> None:
    assert eviction_of(parsed()) == "lru"


def test_shares_have_weights() -> None:
    made = eviction_of(parsed("--share", "a=3", "--share", "b=x=0.5", "--share", "=2"))
    assert isinstance(made, Shares)
    assert made.weights == {"a": 3.0, "b=x": 0.5, "": 2.0}


@pytest.mark.parametrize("text", ["a", "a=", "a=b", "a=0", "a=-1", "a=nan", "a=inf"])
def test_wrong_shares_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="share"):
        eviction_of(parsed("--share", text))


@pytest.mark.parametrize("name", ["priority", "returns"])
def test_shares_go_with_every_policy(name: str) -> None:
    made = eviction_of(parsed("--share", "a=1", eviction=name))
    assert isinstance(made, Shares)
    assert made.name == f"{name}+shares"
