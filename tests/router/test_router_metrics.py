"""The router's metrics: what they say of many instances, read while these come and go."""

from __future__ import annotations

import asyncio
import threading

from prometheus_client.parser import text_string_to_metric_families

from kvkeep.serve.http import BodyBudget
from kvkeep.serve.kv_events import BlockStored
from kvkeep.serve.router import PrefixRouter
from kvkeep.serve.router.health import InstanceHealth
from kvkeep.serve.router.metrics import RouterMetrics
from kvkeep.serve.router.upstreams import Upstreams


def parsed(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_each_instance_has_its_figures():
    names = ["http://a:1", "http://b:2", 'odd "name"\\n']
    router, metrics = PrefixRouter(names), RouterMetrics(BodyBudget())
    blocks = BlockStored([1, 2], None, [*range(32)], 16, lora_id=None, lora_name=None, medium="GPU")
    router.apply(names[2], [blocks])
    up, suspect, resting = InstanceHealth.UP, InstanceHealth.SUSPECT, InstanceHealth.RESTING
    states = dict(zip(names, (up, suspect, resting), strict=True))
    found = parsed(metrics.exposition(states, router, None))
    for name, state in states.items():
        assert found["kvkeep_router_running", name] == 0
        assert found["kvkeep_router_waiting_seconds", name] == 0
        assert found["kvkeep_router_suspect", name] == (state is suspect)
        assert found["kvkeep_router_resting", name] == (state is resting)
        assert found["kvkeep_router_instance_blocks", name, "known"] == 2 * (name == names[2])
        assert found["kvkeep_router_instance_blocks", name, "evicted"] == 0
    for state in InstanceHealth:
        assert found["kvkeep_router_instances", state.value] == [*states.values()].count(state)
    assert found["kvkeep_router_blocks", "blocks"] == 2


def test_figures_are_written_by_threads_while_instances_come_and_go():
    names = [f"http://i{number}:8000" for number in range(60)]

    async def scraped() -> None:
        router, upstreams = PrefixRouter(names), Upstreams(names)
        metrics, over = RouterMetrics(BodyBudget()), threading.Event()

        def change() -> None:
            while not over.is_set():
                for name in names[:30]:
                    router.remove(name)
                    metrics.forget(name)
                for name in names[:30]:
                    router.add(name)
                    metrics.probed(name, True)

        changing = threading.Thread(target=change)
        changing.start()
        try:
            for _ in range(10):
                seen = upstreams.health.states()
                texts = [asyncio.to_thread(metrics.exposition, seen, router, None) for _ in "ab"]
                for text in await asyncio.gather(*texts):
                    found = parsed(text)
                    assert found["kvkeep_router_instances", "up"] == len(names)
                    told = {key[1] for key in found if key[0] == "kvkeep_router_running"}
                    assert told == {*names}
        finally:
            over.set()
            changing.join(20)
            await upstreams.close()

    asyncio.run(scraped())
