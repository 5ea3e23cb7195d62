"""Servers below vLLM's offloading: its tier for objects, which needs NIXL, and kvkeep's for Valkey.

See `test_tier_faults`. NIXL is not among the requirements: its wheel is made for CUDA, although
this part of it runs without. `pip install nixl` beside vLLM runs the tests.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import vllm
from bucket import Bucket
from engines import Answer, prompt
from models import make_llama

from tiers import OBJ, OURS, SideBySide, cached, outcome, seen, side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Server

nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="vLLM's tier for objects needs NIXL"
)

ASKED = [prompt(length, seed=98) for length in (97, 193, 300)]
FULL = sum(len(one) // 32 * 32 for one in ASKED)
LIMITS = {"load_timeout": 0.5, "buffer": "2MiB"}


@pytest.fixture(autouse=True, scope="module")
def telemetry() -> Iterator[None]:
    """Without it the first write to a bucket ends the engine: vLLM asks NIXL how long it took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIXL_TELEMETRY_ENABLE", "y")
        yield


def obj_tier(bucket: Bucket) -> dict[str, Any]:
    config = {
        "bucket": "bucket", "endpoint_override": f"http://127.0.0.1:{bucket.port}",
        "scheme": "http", "access_key": "the-key", "secret_key": "the-secret",
        "region": "us-east-1",
    }  # fmt: skip
    return {"type": "obj", "store_config": config, "locality": "LOCAL"}


def patience(engine: SideBySide) -> float:
    """Seconds in which a request is answered that waits for nothing."""
    began = time.monotonic()
    engine.load("cold", ASKED)
    return 2 + 10 * (time.monotonic() - began)


def test_a_server_that_hangs_and_one_that_is_dead(llama: str, server: Server) -> None:
    with side_by_side(llama, [], [server.url(timeout="60s")], options=LIMITS) as one:
        cold = one.load("cold", ASKED)
        one.written()
        warm = one.load(OURS, ASKED)
        assert (outcome(cold, warm), cached(warm)) == ("right tokens", FULL)
        one.forget_buffer()
        server.hang()
        began = time.monotonic()
        hung = one.load(OURS, ASKED)
        assert time.monotonic() - began < 60
        assert one["late_lookups"] + one["late_tokens"] > 0
        seen("a server that hangs", OURS, outcome(cold, hung))
        server.go_on()
        assert one["loaded_tokens"] > 0
        server.close()
        seen("a dead server", OURS, outcome(cold, one.load(OURS, ASKED)))


@nixl
def test_what_an_earlier_engine_left_in_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "llama"
    make_llama(model, seed=98)
    ours = [f"file://{tmp_path}/kv?size=64MiB"]
    with Bucket() as bucket:
        with side_by_side(str(model), [obj_tier(bucket)], ours) as one:
            cold = one.load("cold", ASKED)
            one.written()
        assert len(bucket.objects) == FULL // 32
        with side_by_side(str(model), [obj_tier(bucket)], ours) as one:
            warm = one.load(OBJ, ASKED)
            assert cached(warm) == FULL
            seen("a restart", OBJ, outcome(cold, warm))
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "__version__", "0.999.0")
            with side_by_side(str(model), [obj_tier(bucket)], ours) as one:
                assert cached(one.load(OBJ, ASKED)) == FULL
                seen("KV of another version of vLLM", OBJ, "is read as its own")
        make_llama(model, seed=99)
        with side_by_side(str(model), [obj_tier(bucket)], ours) as one:
            theirs = one.load(OBJ, ASKED)
            cold = one.load("cold", ASKED)
            assert cached(theirs) == FULL
            seen("other weights under the same path", OBJ, outcome(cold, theirs))


@dataclass
class World:
    engine: SideBySide
    bucket: Bucket
    cold: list[Answer]

    def damaged(self, fault: Callable[[bytes], bytes | None]) -> list[Answer]:
        """Do this to all objects, and ask; then put back what they were."""
        before = dict(self.bucket.objects)
        assert len(before) >= FULL // 32
        for name, raw in before.items():
            changed = fault(raw)
            if changed is None:
                del self.bucket.objects[name]
            else:
                self.bucket.objects[name] = changed
        warm = self.engine.load(OBJ, ASKED)
        self.engine.written()
        self.bucket.objects.update(before)
        return warm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("bucket")
    model = make_llama(place / "llama", seed=98)
    ours = [f"file://{place}/kv?size=64MiB"]
    with Bucket() as bucket, side_by_side(model, [obj_tier(bucket)], ours) as one:
        cold = one.load("cold", ASKED)
        one.written()
        yield World(one, bucket, cold)


@nixl
def test_a_flipped_bit_for_obj(world: World) -> None:
    def flip(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[len(raw) // 2 | 3] ^= 0x04
        return bytes(changed)

    warm = world.damaged(flip)
    assert cached(warm) == FULL
    seen("a flipped bit", OBJ, outcome(world.cold, warm))


@nixl
def test_an_object_cut_in_half(world: World) -> None:
    seen("a file cut in half", OBJ, outcome(world.cold, world.damaged(lambda r: r[: len(r) // 2])))


@nixl
def test_a_missing_object(world: World) -> None:
    warm = world.damaged(lambda raw: None)
    assert cached(warm) == 0
    seen("a missing file", OBJ, outcome(world.cold, warm))


@nixl
def test_a_bucket_that_hangs(world: World) -> None:
    wait = patience(world.engine)
    world.bucket.answers.clear()
    answered = world.engine.answered(OBJ, ASKED[-1], wait, world.bucket.answers.set)
    seen(
        "a server that hangs", OBJ, "right tokens" if answered else "the request hangs with it"
    )  # fmt: skip


@nixl
def test_a_dead_bucket(world: World) -> None:
    """The last test: the bucket does not come back. Its client tries for minutes."""
    wait = patience(world.engine)
    world.bucket.die()
    answered = world.engine.answered(OBJ, ASKED[-1], wait, lambda: None)
    seen("a dead server", OBJ, "right tokens" if answered else "right tokens after minutes")
