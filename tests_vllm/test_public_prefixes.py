"""Public prefixes: one copy for all salts, and nothing of one salt that another could see."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from engines import BLOCK, Answer, Engine, engine, prompt, same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYSTEM = prompt(4 * BLOCK + 7, seed=100)
"""Four blocks, and a part of the fifth, which is private."""
PUBLIC = 4 * BLOCK


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("public") / "public.jsonl"
    file.write_text(f"{SYSTEM}\n{json.dumps(SYSTEM[: BLOCK - 1])}\n")
    return str(file)


@contextmanager
def sharing(
    model: str, declared: str, tiers: tuple[str, ...] = ("memory://64MiB",)
) -> Iterator[Engine]:
    with engine(model, list(tiers), extra={"public_prefixes": declared}) as one:
        yield one


def asked(one: Engine, tokens: list[int], salt: str | None, **more: object) -> Answer:
    """Ask with nothing in vLLM's own cache."""
    one.forget()
    (answer,) = one.ask([tokens], salt=salt, **more)  # type: ignore[arg-type]
    return answer


def blocks(one: Engine) -> int:
    return one.store.stats()[0].blocks


def test_one_copy_for_all_salts(llama: str, cold: list[Answer], declared: str) -> None:
    del cold  # it was there before
    questions = [[*SYSTEM, *prompt(70, seed=number)] for number in range(6)]
    with engine(llama) as plain:
        expected = [asked(plain, one, None) for one in questions]
    with sharing(llama, declared) as one:
        answers = [asked(one, each, f"salt {n}") for n, each in enumerate(questions)]
        same(expected, answers)
        assert [answer.cached for answer in answers] == [0] + 5 * [PUBLIC]
        private = len(questions[0]) // BLOCK - 4
        assert blocks(one) == 4 + 6 * private
        # Without a salt, and with one that was there before.
        assert asked(one, questions[0], None).cached == PUBLIC
        assert asked(one, questions[0], "salt 0").cached == (4 + private) * BLOCK
        one.store.check()


def test_nothing_of_another_salt_is_seen(llama: str, declared: str) -> None:
    """What is computed for guesses is the same, whether the victim was there or not."""
    secret = [*SYSTEM, *prompt(3 * BLOCK, seed=7)]
    guesses = [secret, secret[: PUBLIC + BLOCK], [*secret[:-1], 3], secret[: PUBLIC + 5]]
    counts: list[list[int]] = []
    answers: list[list[Answer]] = []
    for victim in (False, True):
        with sharing(llama, declared) as one:
            asked(one, [*SYSTEM, 9, 9, 9], "somebody")
            if victim:
                asked(one, secret, "victim", max_tokens=40)
                asked(one, secret[: PUBLIC + BLOCK], "victim", max_tokens=40)
            found = [asked(one, guess, salt) for guess in guesses for salt in ("attacker", None)]
            answers.append(found)
            counts.append([answer.cached for answer in found])
    assert counts[0] == counts[1]
    same(*answers)


def test_nothing_else_enters_the_public_part(llama: str, declared: str) -> None:
    """Parts of the public prefix, others around it, and answers that continue it are private."""
    with sharing(llama, declared) as one:
        for tokens in (
            SYSTEM[: 3 * BLOCK],
            [5, *SYSTEM],
            [*SYSTEM[:40], 5, *SYSTEM[41:]],
            [*SYSTEM[: PUBLIC - 1], 5, *prompt(40)],
        ):
            asked(one, tokens, "attacker", max_tokens=3 * BLOCK)
        assert asked(one, [*SYSTEM, *prompt(50)], "a").cached == 0
        assert asked(one, [*SYSTEM, *prompt(51)], "b").cached == PUBLIC
        assert asked(one, SYSTEM[: 3 * BLOCK], "b").cached == 0


def test_a_tenant_deletes_its_own_blocks_alone(
    llama: str, declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time
    from types import SimpleNamespace

    mine = [*SYSTEM, *prompt(70)]
    with sharing(llama, declared) as one:
        asked(one, mine, "a", kvkeep={"ttl": 600})
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 601)
        monkeypatch.setattr("kvkeep.integrations.vllm.kept.time", later)
        assert asked(one, mine, "a").cached == PUBLIC


def test_the_next_process_finds_the_public_part(llama: str, declared: str, tmp_path: Path) -> None:
    tiers = (f"file://{tmp_path}/kv?size=64MiB",)
    with sharing(llama, declared, tiers) as one:
        asked(one, [*SYSTEM, *prompt(70)], "a")
    with sharing(llama, declared, tiers) as one:
        assert asked(one, [*SYSTEM, *prompt(70, seed=5)], "b").cached == PUBLIC
    with engine(llama, list(tiers)) as one:  # nothing is declared: the public part is not known
        assert asked(one, [*SYSTEM, *prompt(70)], "a").cached == 0


def test_texts_and_chats_are_tokens_of_vllms_tokenizer(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    words = [f"t{token}" for token in SYSTEM]
    file.write_text(json.dumps(" ".join(words)) + "\n")
    with sharing(llama, str(file)) as one:
        asked(one, [*SYSTEM, *prompt(70)], "a")
        assert asked(one, [*SYSTEM, *prompt(70, seed=5)], "b").cached == PUBLIC


def test_a_wrong_file_is_an_error_at_the_start(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text('{"messages": [{"role": "system", "content": "You help."}]}\n')
    for path, message in ((file, "line 1: .*chat template"), (tmp_path / "none", "cannot read")):
        with pytest.raises(Exception, match=message), sharing(llama, str(path)):
            pass
