"""What is loaded says what was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import LENGTHS, PROMPTS, Answer, Engine, engine, found, prompt, same

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def running(llama: str, cold: list[Answer]) -> Iterator[Engine]:
    del cold  # it was there before
    with engine(llama, ["memory://64MiB"]) as one:
        one.ask(PROMPTS)
        yield one


def test_what_is_loaded_says_the_same(running: Engine, cold: list[Answer]) -> None:
    running.forget()
    before = running["loaded_tokens"]
    warm = running.ask(PROMPTS)
    same(cold, warm)
    assert [answer.cached for answer in warm] == [found(length) for length in LENGTHS]
    assert running["loaded_tokens"] - before == sum(
        min(found(length), length - 1) for length in LENGTHS
    )
    assert running["failed_tokens"] == 0


def test_a_wrong_byte_would_be_seen(running: Engine, cold: list[Answer]) -> None:
    """Else all of these tests would say nothing."""
    long = PROMPTS[-1]
    store, hashes = running.store, []
    follow = running.core.scheduler.connector.on_new_request
    running.core.scheduler.connector.on_new_request = lambda request: (
        hashes.append(list(request.block_hashes)), follow(request)
    )  # fmt: skip
    running.forget()
    try:
        running.ask([long])
        key = [bytes(hashes[0][3])]
        page = memoryview(bytearray(65536))
        assert store.get(key, [page]) == 1
        store.remove(key)
        page[100:20000] = bytes(page[20100:40000])
        assert store.put(key, [page]) == 1
        running.forget()
        assert running.ask([long])[0].differs(cold[-1]) > 1e-3
    finally:
        running.core.scheduler.connector.on_new_request = follow
        store.remove([bytes(key) for key in hashes[0]])


def test_blocks_of_answers_are_found_by_the_next_turn(running: Engine) -> None:
    first = prompt(90, seed=7)
    answer = running.ask([first], max_tokens=70)[0]
    running.forget()
    turn = first + list(answer.tokens) + prompt(20, seed=8)
    warm = running.ask([turn])[0]
    assert warm.cached == (90 + 69) // 32 * 32
    running.store.clear()
    running.forget()
    fresh = running.ask([turn])[0]
    assert fresh.cached == 0
    same([fresh], [warm])
    running.ask(PROMPTS)


def test_part_of_a_prompt_in_vllm_and_the_rest_in_kvkeep(running: Engine) -> None:
    long = prompt(400, seed=9)
    whole = running.ask([long])[0]
    running.forget()
    running.ask([long[:130]])
    loaded = running["loaded_tokens"]
    again = running.ask([long])[0]
    same([whole], [again])
    assert again.cached == 384
    assert running["loaded_tokens"] - loaded == 384 - 128
