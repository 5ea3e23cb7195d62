"""Namespaces and block keys: the format, and that nothing can be confused with anything else."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import InvalidValue, Namespace
from kvkeep.core.extras import as_extras
from kvkeep.core.keys import KEY_BYTES, as_namespace, chain_keys, root_key
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCUMENT = Path(__file__).parents[1] / "docs" / "keys.md"
FIELDS = tuple(field.name for field in fields(Namespace))


def independent_keys(
    namespace: dict[str, str],
    tokens: list[int],
    block: int,
    extra: Sequence[tuple[int, bytes]] = (),
) -> list[bytes]:
    """The format once more, from its description alone: [root, key of 0, key of 1, …]."""
    canonical = b""
    for name in sorted(namespace):
        value = namespace[name].encode("utf-8")
        if value:
            canonical += name.encode() + b"=" + str(len(value)).encode() + b":" + value + b"\n"
    keys = [hashlib.sha256(b"kvkeep namespace 1\n" + canonical).digest()]
    for i in range(len(tokens) // block):
        packed = struct.pack(f"<{block}i", *tokens[i * block : (i + 1) * block])
        own = [(at - i * block, data) for at, data in extra if i * block <= at < (i + 1) * block]
        if own:
            packed += b"\xff\xff\xff\xff"
        for position, data in own:
            packed += struct.pack("<i", position) + hashlib.sha256(data).digest()
        keys.append(hashlib.sha256(keys[-1] + packed).digest())
    return keys


def keys_of(namespace: Namespace, tokens: list[int], block: int) -> list[bytes]:
    root = root_key(namespace)
    return [root, *chain_keys(root, as_tokens(tokens).tobytes(), block * 4)]


# --- the format ------------------------------------------------------------------------------


@given(
    namespace=st.dictionaries(st.sampled_from(FIELDS), st.text(max_size=8)),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    block=st.integers(1, 9),
)
def test_keys_are_those_of_the_description(
    namespace: dict[str, str], tokens: list[int], block: int
) -> None:
    assert keys_of(Namespace(**namespace), tokens, block) == independent_keys(
        namespace, tokens, block
    )


def vectors() -> list[dict[str, str]]:
    """The test vectors of the document: a name, two spaces or more, and what it is."""
    blocks = re.findall(r"^```vector\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.DOTALL | re.M)
    rows = [re.findall(r"^(\S+(?: \S+)*)(?: {2,}(.*))?$", block, re.M) for block in blocks]
    return [dict(row) for row in rows]


def test_the_document_has_three_vectors() -> None:
    assert len(vectors()) == 3


@pytest.mark.parametrize("vector", vectors(), ids=["all-empty", "six-fields", "extras"])
def test_vectors_of_the_document(vector: dict[str, str]) -> None:
    block = int(vector.pop("tokens per block"))
    text = vector.pop("tokens")
    if "…" in text:
        first, last = text.split(" … ")
        tokens = list(range(int(first), int(last) + 1))
    else:
        tokens = [int(token) for token in text.split()]
    pairs = re.findall(r'(\d+) "(\w*)"', vector.pop("extra", ""))
    extra = [(int(at), text.encode()) for at, text in pairs]
    canonical = vector.pop("canonical").replace("\\n", "\n").encode()
    root = vector.pop("root")
    expected = [vector.pop(f"key of {i}") for i in range(len(tokens) // block)]
    assert set(vector) <= set(FIELDS), "a line of the vector that this test does not read"
    namespace = Namespace(**vector)

    assert namespace.canonical() == canonical
    keys = [root_key(namespace)]
    extras = as_extras(extra, len(tokens))
    keys += chain_keys(keys[0], as_tokens(tokens).tobytes(), block * 4, extras)
    assert [key.hex() for key in keys] == [root, *expected]
    named = {name: getattr(namespace, name) for name in FIELDS}
    assert independent_keys(named, tokens, block, extra) == keys


def test_the_document_names_every_field() -> None:
    text = DOCUMENT.read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \|", text[text.index("| field |") :], re.M)
    assert tuple(table) == FIELDS
    order = text[text.index("order of the field names' bytes") :]
    assert re.findall(r"`(\w+)`", order)[: len(FIELDS)] == sorted(FIELDS)


# --- chains ----------------------------------------------------------------------------------


def test_a_chain_can_be_continued() -> None:
    tokens = as_tokens(range(64)).tobytes()
    whole = chain_keys(root_key(Namespace()), tokens, 32)
    front = chain_keys(root_key(Namespace()), tokens[:96], 32)
    assert front + chain_keys(front[-1], tokens[96:], 32) == whole
    assert len(whole) == 8
    assert all(len(key) == KEY_BYTES for key in whole)


def test_a_tail_has_no_key() -> None:
    root = root_key(Namespace())
    assert chain_keys(root, b"", 16) == []
    assert chain_keys(root, as_tokens([1, 2, 3]).tobytes(), 16) == []
    assert len(chain_keys(root, as_tokens([1, 2, 3, 4, 5]).tobytes(), 16)) == 1


@given(
    tokens=st.lists(st.integers(0, 99), min_size=12, max_size=12),
    at=st.integers(0, 11),
    other=st.integers(100, 2**31 - 1),
)
def test_a_changed_token_changes_its_key_and_all_after_it(
    tokens: list[int], at: int, other: int
) -> None:
    before = keys_of(Namespace(), tokens, 3)
    tokens[at] = other
    after = keys_of(Namespace(), tokens, 3)
    block = at // 3
    assert before[: block + 1] == after[: block + 1]
    assert not set(before[block + 1 :]) & set(after)


def test_byte_order_of_the_machine_does_not_matter() -> None:
    tokens = [1, 2, 0x01020304, 2**31 - 1]
    big = as_tokens(np.array(tokens, ">i4"))
    wide = as_tokens(np.array(tokens, ">u8"))
    little = as_tokens(np.array(tokens, "<i4"))
    assert big.tobytes() == wide.tobytes() == little.tobytes() == struct.pack("<4i", *tokens)


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from kvkeep.core.keys import *; from kvkeep.core.tokens import as_tokens\n"
        "print(chain_keys(root_key(Namespace(tenant='a', lora='b')),"
        " as_tokens(range(32)).tobytes(), 32)[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4294967295")
    }
    assert printed == {keys_of(Namespace(tenant="a", lora="b"), list(range(32)), 8)[-1].hex()}


# --- namespaces ------------------------------------------------------------------------------

# What an attacker would try: values that look like the canonical form of other fields.
nasty = st.text(st.sampled_from("=:\n01a\ud800é"), max_size=6) | st.sampled_from(
    ["1:a\nmodel=1:b", "a\nmodel=1:b\n", "model=1:b\n", "=1:", "\udcff", "é", "e\u0301"]
)
namespaces = st.builds(Namespace, **dict.fromkeys(FIELDS, nasty | st.just("")))


@given(namespaces, namespaces)
def test_different_namespaces_have_different_canonical_forms(
    left: Namespace, right: Namespace
) -> None:
    assert (left == right) == (left.canonical() == right.canonical())
    assert (left == right) == (root_key(left) == root_key(right))


@given(namespaces)
def test_a_canonical_form_can_be_read_back(namespace: Namespace) -> None:
    """Which is the proof that it cannot be confused: nothing was lost."""
    rest, read = namespace.canonical(), {}
    while rest:
        name, _, rest = rest.partition(b"=")
        length, _, rest = rest.partition(b":")
        size = int(length)
        assert rest[size : size + 1] == b"\n"
        read[name.decode()] = rest[:size].decode("utf-8", "surrogatepass")
        rest = rest[size + 1 :]
    assert Namespace(**read) == namespace


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_part_of_every_key(field: str) -> None:
    other = Namespace(**{field: "x"})
    assert other != Namespace()
    assert not set(keys_of(other, list(range(8)), 4)) & set(keys_of(Namespace(), list(range(8)), 4))
    assert len({root_key(Namespace(**{name: "x"})) for name in FIELDS}) == len(FIELDS)


def test_text_stands_for_a_tenant() -> None:
    assert as_namespace("acme") == Namespace(tenant="acme")
    assert as_namespace("") == Namespace()
    assert root_key(as_namespace("acme")) == root_key(Namespace(tenant="acme"))
    given_one = Namespace(model="m")
    assert as_namespace(given_one) is given_one


@pytest.mark.parametrize("wrong", [None, 1, b"acme", ("acme",), ["acme"]])
def test_what_is_no_namespace_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue, match="a namespace is a Namespace or text"):
        as_namespace(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"Namespace\.lora is .*; text is needed"):
        Namespace(lora=wrong)  # type: ignore[arg-type]


def test_a_namespace_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Namespace().tenant = "b"  # type: ignore[misc]
