"""Answers that later prompts do not contain are not stored; all others are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from engines import BLOCK, Answer, Engine, apart, engine, prompt, same
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from kvkeep.integrations.vllm.groups import Group, Groups
from kvkeep.integrations.vllm.lookups import FollowedRequest
from kvkeep.integrations.vllm.options import RequestOptions
from kvkeep.integrations.vllm.scheduler import AnswerWatch

if TYPE_CHECKING:
    from pathlib import Path

TALKS, ANSWER, AT_ONCE = 40, 64, 10


def dialogues(one: Engine, *, stripped: bool, first: int) -> tuple[list[Answer], float]:
    """Hold dialogues of two requests, a few at once; the last one is held alone.

    Return the second answers, and the tokens saved of the last dialogue's first request. The second
    prompt leaves the first answer out, or contains it.
    """
    answers, saved = [], 0.0
    last = first + TALKS - 1
    for begin in [*range(first, last, AT_ONCE), last]:
        talks = range(begin, max(min(begin + AT_ONCE, last), begin + 1))
        before = one["saved_tokens"]
        questions = [prompt(70, seed=talk) for talk in talks]
        said = one.ask(questions, max_tokens=ANSWER)
        saved = one["saved_tokens"] - before
        one.forget()
        later = [
            question + ([] if stripped else list(answer.tokens)) + prompt(40, seed=1000 + talk)
            for talk, question, answer in zip(talks, questions, said, strict=True)
        ]
        answers += one.ask(later, max_tokens=8)
    return answers, saved


def test_answers_that_are_never_read_are_not_stored(llama: str) -> None:
    with engine(llama) as plain:
        expected, _ = dialogues(plain, stripped=True, first=0)
    with engine(llama, ["memory://64MiB"]) as one:
        answers, saved = dialogues(one, stripped=True, first=0)
        same(expected, answers)
        assert {answer.cached for answer in answers} == {70 // BLOCK * BLOCK}
        assert saved == 70 // BLOCK * BLOCK
        assert one["unread_tokens"] > TALKS // 2 * ((70 + ANSWER - 1) // BLOCK * BLOCK - saved)


def test_answers_that_are_read_are_all_stored(llama: str, tmp_path: Path) -> None:
    tiers = ["memory://64MiB?policy=returns", f"file://{tmp_path}/kv?size=64MiB&policy=returns"]
    with engine(llama, tiers) as one:
        answers, saved = dialogues(one, stripped=False, first=0)
        assert {answer.cached for answer in answers} == {(70 + ANSWER - 1) // BLOCK * BLOCK}
        assert saved == (70 + ANSWER - 1) // BLOCK * BLOCK
        assert one["unread_tokens"] == 0


def test_answers_that_are_read_again_after_all(llama: str) -> None:
    """They are held back until their end, then saved: the pages are free by then."""
    with engine(llama, ["memory://64MiB"]) as one:
        dialogues(one, stripped=True, first=0)
        answers: list[Answer] = []
        for turn in range(1, 9):  # what is read now is stored again, sooner or later
            answers, _ = dialogues(one, stripped=False, first=TALKS * turn)
            if answers[-1].cached > 70:
                break
        assert answers[-1].cached == (70 + ANSWER - 1) // BLOCK * BLOCK
    with engine(llama) as plain:
        expected, _ = dialogues(plain, stripped=False, first=TALKS * turn)
    same(expected, answers)


@pytest.mark.parametrize(("computed", "complete"), [(0, 0), (40, 2), (99, 6), (100, 6)])
def test_only_what_was_computed_is_complete(computed: int, complete: int) -> None:
    """After a preemption a request computes its answer again, and may end before it has."""
    init_none_hash(sha256)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=True))
    watch = AnswerWatch(config, Groups((Group(("layer",), None),), 16, False), None)
    request = Request(
        "one", list(range(30)), SamplingParams(max_tokens=80), None,
        block_hasher=get_request_block_hasher(16, sha256),
    )  # fmt: skip
    request.append_output_token_ids(list(range(70)))
    request.num_computed_tokens = computed
    request.status = RequestStatus.FINISHED_ABORTED
    assert watch.ended(FollowedRequest(request, RequestOptions())) == (complete, complete)


def test_the_stores_of_several_ranks_learn_when_conversations_return(llama: str) -> None:
    apart("test_answers:returns_in_two_ranks", llama)


def returns_in_two_ranks(llama: str) -> None:
    """Hold three dialogues of three turns; both workers' tiers know how they waited."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(llama, ["memory://64MiB?policy=returns"], **ranks) as one:
        for talk in range(3):
            text = prompt(70, seed=talk)
            for turn in range(3):
                (answer,) = one.ask([text], max_tokens=20)
                text = text + list(answer.tokens) + prompt(30, seed=1000 * turn + talk)
        one.ask([prompt(70, seed=99)], max_tokens=1)  # the last end goes with the next step
        for known in one.core.model_executor.collective_rpc(waits_of_worker):
            assert known == {"waiting": [3, 3, 3], "returned": 6, "blocks": True}


def waits_of_worker(_: Any) -> dict[str, Any]:
    """In a worker: the turns of conversations that wait, and how many returned."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker: Any = get_kv_transfer_group()._worker  # type: ignore[attr-defined]
    worker._teller.submit(int).result(30)  # behind what was told so far
    conversations = worker.shared.store._tiered.conversations
    learner = conversations.returns
    return {
        "waiting": [wait.turns for wait in learner],
        "returned": round(sum(learner._returns)),
        "blocks": all(
            conversations.waits.best(block)[1] for block in list(conversations.waits._at)[-4:]
        ),
    }
