"""Public prefixes: one copy for all salts, and nothing of one salt that another could see."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from engines import BLOCK, Answer, Engine, apart, engine, prompt, same
from hybrids import make_hybrid
from models import make_adapter, make_gemma
from test_both import Kept, both, connected
from vllm import SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256, xxhash
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvkeep.core.public import PublicPrefixes
from kvkeep.integrations.vllm.groups import keys_of
from kvkeep.integrations.vllm.lookups import FollowedRequest
from kvkeep.integrations.vllm.options import RequestOptions
from kvkeep.integrations.vllm.public import PublicBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    model: str, declared: str, tiers: tuple[str, ...] = ("memory://64MiB",), **more: Any
) -> Iterator[Engine]:
    with engine(model, list(tiers), extra={"public_prefixes": declared}, **more) as one:
        yield one


def asked(one: Engine, tokens: list[int], salt: str | None, **more: Any) -> Answer:
    """Ask with nothing in vLLM's own memory."""
    one.forget_all()
    (answer,) = one.ask([tokens], salt=salt, **more)
    return answer


@both
def test_one_copy_for_all_salts(
    llama: str, cold: list[Answer], declared: str, tmp_path: Path, kept: Kept
) -> None:
    del cold  # it was there before
    questions = [[*SYSTEM, *prompt(70, seed=number)] for number in range(6)]
    with engine(llama) as plain:
        expected = [asked(plain, one, None) for one in questions]
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with kept(llama, disk, options={"public_prefixes": declared}) as one:
        answers = [asked(one, each, f"salt {n}") for n, each in enumerate(questions)]
        same(expected, answers)
        assert [answer.cached for answer in answers] == [0] + 5 * [PUBLIC]
        private = len(questions[0]) // BLOCK - 4
        one.forget_all()  # which waits until all is given to the store
        assert one.store.flush(30)
        assert one.store.stats()[1].blocks == 4 + 6 * private
        # Without a salt, and with one that was there before.
        assert asked(one, questions[0], None).cached == PUBLIC
        assert asked(one, questions[0], "salt 0").cached == (4 + private) * BLOCK
        one.store.check()


@both
def test_nothing_of_another_salt_is_seen(
    llama: str, declared: str, tmp_path: Path, kept: Kept
) -> None:
    """What is computed for guesses is the same, whether the victim was there or not."""
    secret = [*SYSTEM, *prompt(3 * BLOCK, seed=7)]
    guesses = [secret, secret[: PUBLIC + BLOCK], [*secret[:-1], 3], secret[: PUBLIC + 5]]
    counts: list[list[int]] = []
    answers: list[list[Answer]] = []
    for victim in (False, True):
        disk = f"file://{tmp_path}/{victim}?size=64MiB"
        with kept(llama, disk, options={"public_prefixes": declared}) as one:
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
    llama: str, declared: str, ten_minutes_later: Callable[[], None]
) -> None:

    mine = [*SYSTEM, *prompt(70)]
    with sharing(llama, declared) as one:
        asked(one, mine, "a", kvkeep={"ttl": 600})
        ten_minutes_later()
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
    for path, message in (
        (file, "line 1: .*chat template"),
        (tmp_path / "none", "cannot read public prefixes"),
    ):
        with pytest.raises(Exception, match=message), sharing(llama, str(path)):
            pass


@both
def test_each_adapter_has_its_own_public_part(
    llama: str, declared: str, tmp_path: Path, kept: Kept
) -> None:
    first = LoRARequest("a", 1, make_adapter(tmp_path / "one", 1))
    other = LoRARequest("b", 2, make_adapter(tmp_path / "two", 2))
    disk = f"file://{tmp_path}/kv?size=64MiB"
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with kept(llama, disk, options={"public_prefixes": declared}, **settings) as one:
        for lora in (first, other, None):
            question = [*SYSTEM, *prompt(50)]
            one.forget_all()
            cold = one.ask([question], salt="a", lora=lora)
            assert cold[0].cached == 0
            one.forget_all()
            warm = one.ask([question], salt="b", lora=lora)
            assert warm[0].cached == PUBLIC
            same(cold, warm)


@both
def test_windows(tmp_path: Path, declared: str, kept: Kept) -> None:
    model = make_gemma(tmp_path / "gemma")
    questions = [[*SYSTEM, *prompt(70, seed=number)] for number in range(3)]
    with engine(model) as plain:
        expected = [asked(plain, one, None) for one in questions]
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with kept(model, disk, options={"public_prefixes": declared}) as one:
        answers = [asked(one, each, f"salt {n}") for n, each in enumerate(questions)]
        same(expected, answers)
        # vLLM's own offloading stores no window but that at the end of a prompt.
        there = PUBLIC if kept is connected else 0
        assert [answer.cached for answer in answers] == [0, there, there]


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_states(tmp_path: Path, name: str) -> None:
    """The first prompt leaves a state where the public part ends; the second one goes on there."""
    hybrid = make_hybrid(name, tmp_path)
    system = prompt(3 * hybrid.block + 5, seed=100)
    file = tmp_path / "public.jsonl"
    file.write_text(json.dumps(system))
    questions = [[*system, *prompt(2 * hybrid.block, seed=number)] for number in range(3)]
    destroy_model_parallel()
    with hybrid.engine(["memory://64MiB"], extra={"public_prefixes": str(file)}) as one:
        answers = [asked(one, each, f"salt {n}") for n, each in enumerate(questions)]
        assert [answer.cached for answer in answers] == [0, *2 * [3 * hybrid.block]]
        # A prompt of one salt goes on where that left off.
        assert asked(one, questions[1], "salt 1").cached == hybrid.cut(questions[1])
        assert asked(one, questions[1], "salt 2").cached == 3 * hybrid.block
        again = asked(one, questions[0], "salt 3")
        if hybrid.exact:
            assert (again.tokens, again.logprobs) == (answers[0].tokens, answers[0].logprobs)
    destroy_model_parallel()


def test_two_ranks(llama: str, declared: str, tmp_path: Path) -> None:
    """Each rank has its own store, which the scheduler asks."""
    apart("test_public_prefixes:two_ranks", llama, declared, f"file://{tmp_path}/kv?size=64MiB")


def two_ranks(llama: str, declared: str, disk: str) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    questions = [[*SYSTEM, *prompt(70, seed=number)] for number in range(2)]
    with connected(llama, disk, options={"public_prefixes": declared}, **ranks) as one:
        answers = [asked(one, each, f"salt {n}") for n, each in enumerate(questions)]
        assert [answer.cached for answer in answers] == [0, PUBLIC]
        assert asked(one, questions[0], "salt 1").cached == PUBLIC
        assert asked(one, questions[0], "salt 0").cached == (len(questions[0]) // BLOCK) * BLOCK


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
def test_hashes_of_other_lengths(llama: str, declared: str, algorithm: str) -> None:
    with sharing(llama, declared, prefix_caching_hash_algo=algorithm) as one:
        first = asked(one, [*SYSTEM, *prompt(70)], "a")
        assert asked(one, [*SYSTEM, *prompt(70)], "b").cached == PUBLIC
        again = asked(one, [*SYSTEM, *prompt(70)], "a")
        assert again.cached > PUBLIC
        same([first], [again])


@dataclass(frozen=True)
class Made:
    """A request, and what its blocks depend on by the definition of public prefixes."""

    request: Request
    public: int

    def depends(self, block: int, size: int) -> object:
        """What the block's KV depends on, with all that separates tenants."""
        request, end = self.request, (block + 1) * size
        tokens = tuple(request.all_token_ids[:end])
        if end <= self.public:
            return tokens
        images = [
            (one.identifier, one.mm_position.offset)
            for one in request.mm_features
            if one.mm_position.offset < end
        ]
        return tokens, request.cache_salt or "", tuple(images)


def made(rng: random.Random, rows: list[list[int]], size: int, hashed: Any) -> Made:
    """A request that begins like one of the rows, or almost so."""
    tokens = [*rng.choice(rows), *(rng.randrange(2) for _ in range(rng.randrange(3 * size)))]
    if rng.random() < 0.3:
        tokens[rng.randrange(len(tokens))] ^= 1
    tokens = tokens[: rng.randrange(1, len(tokens) + 1)] if rng.random() < 0.3 else tokens
    images = []
    if rng.random() < 0.3:
        place = PlaceholderRange(offset=rng.randrange(len(tokens)), length=1)
        images = [MultiModalFeatureSpec(None, "image", rng.choice("ij"), place)]
    salt, hasher = rng.choice([None, "a", "b"]), get_request_block_hasher(size, hashed)
    request = Request(
        "one", tokens, SamplingParams(max_tokens=99), None, mm_features=images, cache_salt=salt,
        block_hasher=hasher,
    )  # fmt: skip
    first = images[0].mm_position.offset if images else len(tokens)
    whole = [row[: len(row) // size * size] for row in rows]
    public = max((len(row) for row in whole if tokens[:first][: len(row)] == row), default=0)
    return Made(request, public)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_have_one_name_where_they_depend_on_the_same(seed: int) -> None:
    """Two blocks of any requests have equal keys if and only if what they depend on is equal.

    Hashes have 32 bytes or 16, with an adapter and without.
    """
    hashed, adapter = (sha256, xxhash)[seed % 2], (None, bytes(32))[seed // 2 % 2]
    init_none_hash(hashed)
    rng, size = random.Random(seed), 4
    rows = [[rng.randrange(2) for _ in range(rng.randrange(3, 18))] for _ in range(3)]
    public = PublicBlocks(PublicPrefixes(rows), size)
    names: dict[bytes, object] = {}
    for _ in range(300):
        one = made(rng, rows, size, hashed)
        followed = FollowedRequest(
            one.request, RequestOptions(), adapter, public=public.hashes(one.request)
        )
        assert len(followed.public) * size == one.public
        # An answer that continues a prefix is private.
        one.request.append_output_token_ids(rng.choice(rows))
        for block, key in enumerate(keys_of(followed.hashes(0, 99), 0)):
            assert names.setdefault(key, one.depends(block, size)) == one.depends(block, size)
            at = [followed.hashes(block, block + 1), followed.hashes(0, 99)[block : block + 1]]
            assert keys_of(at[0], 0) == keys_of(at[1], 0) == [key]
    assert len(set(map(repr, names.values()))) == len(names), "one block has two names"
