"""The side that decides: which blocks of a request are there, and which are to be saved."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.adapters import Adapters
from kvkeep.integrations.vllm.keys import keys_of
from kvkeep.integrations.vllm.messages import (
    Answers,
    BlockSpan,
    PageLoad,
    RankLookup,
    Save,
    StepPlan,
)
from kvkeep.integrations.vllm.options import RequestOptions
from kvkeep.integrations.vllm.shared import SharedStore, log_fault
from kvkeep.integrations.vllm.stats import Counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions

__all__ = ["SchedulerSide"]

_LOG = logging.getLogger("kvkeep.vllm")
_LOOKERS = 4


@dataclass(slots=True)
class _Asked:
    """A question that could not be answered at once: blocks from ``first`` to ``limit``."""

    first: int
    limit: int
    since: float
    number: int = 0
    future: Future[int] | None = None
    answer: int | None = None


@dataclass(slots=True)
class _Followed:
    """A request as long as vLLM has it."""

    request: Request
    options: RequestOptions
    adapter: bytes | None = None  # digest of its LoRA weights
    saved: int = 0  # blocks that were looked at for saving
    loaded: int = -1  # how often it had been preempted when it was last loaded
    hit: tuple[int, int] = (0, 0)  # what was promised last: blocks from … to
    local: int = 0  # tokens that vLLM had when it asked last
    placed: int = -1  # the step in which it got its pages
    held: int = 0  # until that step nothing of it is saved
    asked: _Asked | None = None
    # For the capture: tokens that vLLM had, and that were loaded, when it first began, and when.
    had: int = 0
    promised: int = 0
    began: float | None = None

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Of its blocks, with what vLLM's own do not know mixed in."""
        hashes = self.request.block_hashes[first:end]
        return hashes if self.adapter is None else Adapters.mixed(hashes, self.adapter)


class SchedulerSide:
    """Plans loads and saves. With the store in the same process it looks for itself; else it asks.

    Thread safety: none; it belongs to the scheduler's thread. Cost: about 0.1 µs a block of a
    lookup, 0.7 µs a block that is saved.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: ConnectorOptions,
        groups: Groups,
        *,
        loads: bool,
        saves: bool,
    ) -> None:
        self._options = options
        self._groups = groups
        self._loads_at_all = loads
        self._saves_at_all = saves
        self._ranks = vllm_config.parallel_config.world_size
        self._steps_in_flight = vllm_config.max_concurrent_batches
        self._step = 0
        self._shared = None
        if self._ranks == 1:
            self._shared = SharedStore.find(vllm_config.kv_transfer_config.engine_id)
        self.counts = Counts()
        self._lookers = ThreadPoolExecutor(_LOOKERS, "kvkeep lookup")
        self._adapters = Adapters()
        self._followed: dict[str, _Followed] = {}
        self._questions: dict[int, _Asked] = {}
        self._found: dict[int, list[int]] = {}
        self._number = 0
        self._cleared = 0
        self._plan = StepPlan()
        self._recorder = None
        if options.capture:
            from kvkeep.integrations.vllm.record import Recorder  # noqa: PLC0415 - if asked for

            self._recorder = Recorder(options.capture, vllm_config, groups)

    # --- a request comes -------------------------------------------------------------------------

    def follow(self, request: Request) -> None:
        """vLLM has a new request."""
        options = RequestOptions()
        try:
            options = RequestOptions.parse(request.kv_transfer_params)
        except InvalidValue as error:
            self.counts.add(ignored_params=1)
            _LOG.warning(
                "kv_transfer_params of request %.100r are not followed: %.500s",
                request.request_id,
                str(error),
            )
        followed = _Followed(request, options)
        if request.lora_request is not None:
            followed.adapter = self._adapters.digest(request.lora_request)
            if followed.adapter is None:
                return
        self._followed[request.request_id] = followed

    # --- what is there ---------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> int | None:
        """How many tokens beyond ``computed`` can be loaded; None: ask again with the next step."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            followed.local = computed
            if followed.began is None:
                followed.had = computed
        if (
            followed is None
            or not self._loads_at_all
            or not followed.options.load
            or request.skip_reading_prefix_cache
            # It was loaded since it last began, and starts over: the load failed.
            or followed.loaded == request.num_preemptions
        ):
            return 0
        size = self._groups.block_tokens
        first, limit = computed // size, len(request.block_hashes)
        if self._groups.windowed:  # vLLM computes the last token again, whose window begins earlier
            limit = min(limit, (request.num_tokens - 1) // size)
        least = self._options.min_tokens or size
        if self._gain(request, limit, computed) < least:
            return 0
        end = self._reach(followed, first, limit)
        if end is None:
            return None
        gain = self._gain(request, end, computed)
        if gain < least:
            return 0
        followed.hit = (first, end)
        return end * size - computed

    def _gain(self, request: Request, blocks: int, computed: int) -> int:
        """Tokens that need not be computed; the last one is, for the next to be chosen."""
        tokens: int = request.num_tokens
        return min(blocks * self._groups.block_tokens, tokens - 1) - computed

    def _reach(self, followed: _Followed, first: int, limit: int) -> int | None:
        """Up to which block it is there; None: not known yet."""
        asked = followed.asked
        if asked is None or (asked.first, asked.limit) != (first, limit):
            hashes = followed.hashes(0, limit)
            there = first
            if self._shared is not None:
                self._shared.delete_expired()
                there = self._groups.reach(hashes, first, self._shared.knows)
                if there == limit or not self._shared.must_ask:
                    return there
            asked = followed.asked = self._ask(followed, hashes, first, limit)
            asked.answer = None
        if asked.future is not None and asked.future.done():
            asked.answer = first if asked.future.exception() else asked.future.result()
        if asked.answer is not None:
            return asked.answer
        if time.monotonic() - asked.since < self._options.lookup_timeout:
            return None
        self.counts.add(late_lookups=1)
        asked.answer = first
        if self._shared is not None:
            hashes = followed.hashes(0, limit)
            asked.answer = self._groups.reach(hashes, first, self._shared.knows)
        return asked.answer

    def _ask(self, followed: _Followed, hashes: Sequence[bytes], first: int, limit: int) -> _Asked:
        asked = _Asked(first, limit, time.monotonic())
        if self._shared is not None:
            asked.future = self._lookers.submit(self._look, self._shared, list(hashes), first)
            asked.future.add_done_callback(log_fault)
            return asked
        self._number += 1
        asked.number = self._number
        self._questions[asked.number] = asked
        self._plan.questions.append(
            RankLookup(followed.request.request_id, asked.number, first, list(hashes))
        )
        return asked

    def _look(self, shared: SharedStore, hashes: list[bytes], first: int) -> int:
        """In a thread: ask the tiers that others write to, too."""
        until = time.monotonic() + self._options.lookup_timeout

        def count(keys: list[bytes]) -> int:
            return shared.lookup(keys, max(0.0, until - time.monotonic()))

        try:
            return self._groups.reach(hashes, first, count)
        finally:
            shared.news.set()

    def heard(self, output: KVConnectorOutput) -> None:
        """What workers with stores of their own found; what all have counts."""
        answers = output.kv_connector_worker_meta
        if not isinstance(answers, Answers):
            return
        for number, found in answers.found.items():
            asked = self._questions.get(number)
            if asked is None:
                continue
            all_found = self._found.setdefault(number, [])
            all_found += found
            if len(all_found) == self._ranks:
                asked.answer = min(all_found)
                self._forget(asked)

    def _forget(self, asked: _Asked) -> None:
        self._questions.pop(asked.number, None)
        self._found.pop(asked.number, None)

    # --- what is to be done ----------------------------------------------------------------------

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The request has pages, ``external`` tokens of which are to be loaded."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            followed.placed = self._step
            if followed.began is None:
                followed.began, followed.promised = time.time(), external
        if followed is None or external == 0:
            return
        size = self._groups.block_tokens
        first, end = followed.hit
        assert external == (end - first) * size, f"{external} tokens of {end - first} blocks"
        followed.loaded = request.num_preemptions
        followed.asked = None
        tables = blocks.get_block_ids()
        spans = []
        for at, group in enumerate(self._groups.groups):
            start = max(first, group.first_needed(end * size, size))
            spans.append(_span(at, followed.hashes(start, end), tables[at][start:end]))
        tokens = self._gain(request, end, first * size)
        self.counts.add(hit_tokens=tokens)
        self._plan.loads.append(
            PageLoad(request.request_id, [span for span in spans if span.keys], tokens)
        )

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers are to do with this step."""
        plan, self._plan = self._plan, StepPlan()
        step, self._step = self._step, self._step + 1
        plan.idle = output.total_num_scheduled_tokens == 0
        plan.asking = plan.idle and any(
            one.asked is not None and one.asked.answer is None for one in self._followed.values()
        )
        plan.clear = self._cleared
        if self._saves_at_all:
            size = self._groups.block_tokens
            for request_id, scheduled in output.num_scheduled_tokens.items():
                followed = self._followed.get(request_id)
                if followed is None or not followed.options.store:
                    continue
                request = followed.request
                if followed.placed == step and self._is_foreign(followed):
                    followed.held = step + self._steps_in_flight + 1
                if step < followed.held:
                    continue
                # Full after this step, and of tokens that are final: those have hashes.
                end = (request.num_computed_tokens + scheduled) // size
                end = min(end, len(request.block_hashes))
                if not (self._options.answers and followed.options.answers):
                    end = min(end, request.num_prompt_tokens // size)
                if end > followed.saved:
                    state = output.kv_connector_block_state
                    tables = None if state is None else state.get_block_ids(request_id)
                    if tables is not None:
                        self._save(followed, end, tables, plan)
        return plan

    @staticmethod
    def _is_foreign(followed: _Followed) -> bool:
        """Whether another connector (in `MultiConnector`) fills pages of it in this very step.

        If that fails, vLLM hears of it with the step's results, and computes them again.
        """
        request = followed.request
        ours = followed.loaded == request.num_preemptions
        return not ours and bool(request.num_computed_tokens > followed.local)

    def _save(
        self, followed: _Followed, end: int, tables: tuple[list[int], ...], plan: StepPlan
    ) -> None:
        start, followed.saved = followed.saved, end
        hashes = followed.hashes(start, end)
        spans = []
        for at in range(len(self._groups.groups)):
            span = _span(at, hashes, tables[at][start:end])
            if self._shared is not None:
                wanted = self._shared.unknown(span.keys)
                span.keys = [span.keys[i] for i in wanted]
                span.pages = [span.pages[i] for i in wanted]
            if span.keys:
                spans.append(span)
        if spans:
            plan.saves.append(Save(spans, followed.options.ttl))

    def finished(self, request: Request) -> None:
        """The request has ended, one way or the other."""
        followed = self._followed.pop(request.request_id, None)
        if self._recorder is not None:
            known = followed or _Followed(request, RequestOptions())
            self._recorder.ended(
                request,
                cached=known.had + known.promised,
                loaded=known.promised,
                first=known.began,
                store=self._saves_at_all and known.options.store,
            )
        if followed is None:
            return
        if followed.asked is not None:
            self._forget(followed.asked)
        if followed.options.pin is not None and followed.saved:
            hashes = followed.hashes(0, followed.saved)
            for at in range(len(self._groups.groups)):
                self._plan.pins.append((keys_of(hashes, at), followed.options.pin))

    def clear(self) -> bool:
        """Delete everything that engines of this namespace stored; False: a tier has it still."""
        for followed in self._followed.values():
            followed.asked = None
        if self._shared is None:
            self._cleared += 1  # with the next step
            return True
        return self._shared.clear()

    def close(self) -> None:
        """It is over; the store's own side closes it, unless it was forgotten."""
        self._lookers.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._recorder.close()
        if self._shared is not None:
            self._shared.close()


def _span(group: int, hashes: Sequence[bytes], pages: Sequence[int]) -> BlockSpan:
    """Blocks with a page; those that have left the window have none (vLLM's null block, 0)."""
    keys = keys_of(hashes, group)
    if 0 in pages:
        there = [at for at, page in enumerate(pages) if page]
        return BlockSpan(group, [keys[at] for at in there], [pages[at] for at in there])
    return BlockSpan(group, keys, list(pages))
