"""The scheduler's side: finds the stored blocks of requests, and plans loads and saves."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import numpy as np

from kvkeep.core.cost import CostModel
from kvkeep.core.returns import Ended, stop_after
from kvkeep.integrations.vllm.content import RequestContent, Resets
from kvkeep.integrations.vllm.groups import keys_of
from kvkeep.integrations.vllm.kept import SharedStore
from kvkeep.integrations.vllm.lookups import BlockLookups, FollowedRequest, RequestChoices
from kvkeep.integrations.vllm.messages import BlockSpan, PageLoad, StepPlan, WorkerNews
from kvkeep.integrations.vllm.options import RequestMistakes
from kvkeep.integrations.vllm.public import PublicBlocks, prefixes_in
from kvkeep.integrations.vllm.stats import Counts
from kvkeep.store.blocks import BlockReturns, ReturnRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.vllm.groups import BlockReach, Groups
    from kvkeep.integrations.vllm.messages import Save
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.store.tiers import ReturnNotes

__all__ = ["AnswerWatch", "SchedulerSide"]


_LOG = logging.getLogger("kvkeep.vllm")


class SchedulerSide:
    """Plans the loads and saves of every step.

    Thread safety: none; it belongs to the scheduler's thread. Cost: about 0.1 µs a block of a
    lookup, 0.7 µs a block that is saved.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: ConnectorOptions,
        groups: Groups,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._options = options
        self._groups = groups
        self._stateful = bool(groups.states)
        self._anywhere = groups.resumes_anywhere
        self._loads = transfer.is_kv_consumer
        self._saves = transfer.is_kv_producer
        self._steps_in_flight = vllm_config.max_concurrent_batches
        self._step = 0
        self._shared = None
        ranks = vllm_config.parallel_config.world_size
        if ranks == 1:
            self._shared = SharedStore.find(transfer.engine_id)
        self.counts = Counts()
        self._mistakes = RequestMistakes(self.counts)
        self._lookups = BlockLookups(groups, self._shared, self.counts, ranks=ranks)
        self._answers = AnswerWatch(
            vllm_config, groups, self._shared,
            waits=any(parse_qs(urlsplit(tier).query).get("policy") == ["returns"]
                      for tier in options.tiers),
        )  # fmt: skip
        self._choices = None
        if self._loads and options.compare_costs:
            cost = CostModel() if self._shared is None else self._shared.costs.cost
            self._choices = RequestChoices(
                vllm_config, cost.prefill, groups, self._lookups, self.counts
            )
        self._content = RequestContent(vllm_config, self.counts)
        self._resets = Resets()
        size = groups.block_tokens
        public = prefixes_in(options.public_prefixes, vllm_config, size)
        self._public = PublicBlocks(public, size)
        self._followed: dict[str, FollowedRequest] = {}
        self._generation = 0
        self._plan = StepPlan()  # of the next step

    def bind_pool(self, pool: BlockPool) -> None:
        """Take vLLM's pool of pages."""
        self._resets.bind(pool)

    def follow(self, request: Request) -> None:
        """Track a new request; one whose KV is not kept is ignored."""
        options = self._mistakes.options(request.request_id, request.kv_transfer_params)
        if not self._content.is_kept(request):
            return
        followed = FollowedRequest(request, options)
        if request.lora_request is not None:
            followed.adapter = self._content.adapter(request)
            if followed.adapter is None:
                return
        followed.public = self._public.hashes(request)
        self._followed[request.request_id] = followed

    # --- loads -----------------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> int | None:
        """Return the number of tokens to load beyond ``computed``; None: call in the next step."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            followed.local = computed
            self._resets.begin(request, computed)
        if (
            followed is None
            or not self._loads
            or not followed.options.load
            or request.skip_reading_prefix_cache
            # It was loaded since its last preemption and starts again: the load failed.
            or followed.loaded == request.num_preemptions
        ):
            return 0
        size = self._groups.block_tokens
        first, limit = computed // size, len(request.block_hashes)
        if not self._anywhere:
            # vLLM computes the last token again: its window begins earlier, and so does its state.
            limit = min(limit, (request.num_tokens - 1) // size)
        if self._gain(request, limit, computed) < size:
            return 0
        saves_s = None
        if self._choices is not None:
            saves_s = self._choices.saves_s(request.num_tokens, computed, limit)
        reach = self._lookups.reach(followed, first, limit, saves_s)
        if reach is None:
            return None
        end = reach.end
        if self._stateful and self._saves and followed.options.store:
            _stop_at_branch(request, reach, size, first=first, public=len(followed.public))
        if self._gain(request, end, computed) < size:
            return 0
        if self._choices is not None:
            end = self._choices.best_end(followed, computed, first, end, self._followed)
            if self._gain(request, end, computed) < size:
                return 0
        followed.hit = (first, end)
        return end * size - computed

    def _gain(self, request: Request, blocks: int, computed: int) -> int:
        """Return the number of tokens saved; the last token is always computed, for its logits."""
        tokens: int = request.num_tokens
        return min(blocks * self._groups.block_tokens, tokens - 1) - computed

    def receive(self, output: KVConnectorOutput) -> None:
        """Take the news of workers."""
        news = output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self._lookups.receive(news)
            if self._choices is not None:
                self._choices.receive(news)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Plan the load of a request that has pages; ``external`` tokens are to be loaded."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            followed.placed = self._step
            if not followed.began:
                followed.began = True
                self._answers.requested(followed)
            if self._choices is not None:
                self._choices.placed(followed, external, self._plan)
        if followed is None or external == 0:
            return
        size = self._groups.block_tokens
        first, end = followed.hit
        assert external == (end - first) * size, f"{external} tokens of {end - first} blocks"
        followed.loaded = request.num_preemptions
        followed.lookup = None
        tables = blocks.get_block_ids()
        spans = []
        for at, group in enumerate(self._groups.groups):
            start = max(first, group.first_needed(end * size, size))
            spans.append(_span(at, followed.hashes(start, end), tables[at][start:end]))
        if self._stateful:
            followed.states.add(end)
            # The states first: they are small, and KV without them is of no use.
            spans.sort(key=lambda span: not self._groups.groups[span.group].state)
            assert all(span.keys for span in spans), f"no page for the states at block {end}"
        tokens = self._gain(request, end, first * size)
        self.counts.add(hit_tokens=tokens)
        load = PageLoad(request.request_id, [span for span in spans if span.keys], tokens)
        if self._choices is not None:
            self._choices.loading(followed, load)
        self._plan.loads.append(load)

    # --- saves -----------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Return the loads, saves and lookups of the workers in this step."""
        plan, self._plan = self._plan, StepPlan()
        step, self._step = self._step, self._step + 1
        plan.idle = output.total_num_scheduled_tokens == 0
        plan.waiting = plan.idle and any(
            one.lookup is not None and one.lookup.result is None for one in self._followed.values()
        )
        plan.lookups = self._lookups.take_messages()
        plan.generation = self._generation
        plan.returns = self._answers.take()
        plan.step = step
        if self._choices is not None:
            plan.reports = self._choices.planned(step, output, self._followed)
        if self._saves:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                followed = self._followed.get(request_id)
                if followed is None or not followed.options.store:
                    continue
                if self._resets.is_stale(request_id):
                    continue
                followed.ran = followed.request.num_preemptions
                if followed.placed == step and self._is_foreign(followed):
                    followed.held = step + self._steps_in_flight + 1
                if step < followed.held:
                    continue
                end = self._complete(followed, scheduled)
                state = output.kv_connector_block_state
                if state is None:
                    continue
                spans: list[BlockSpan] = []
                if end > followed.saved:
                    tables = state.get_block_ids(request_id)
                    if tables is not None:
                        spans = self._blocks(followed, end, tables)
                if self._stateful:
                    new = followed.placed == step
                    spans += _states_of_step(self._groups, followed, end, state, new=new)
                if spans:
                    self._save(followed, spans, plan.saves)
        return plan

    def _complete(self, followed: FollowedRequest, scheduled: int) -> int:
        """Return the number of blocks that are full of final tokens after this step."""
        request, size = followed.request, self._groups.block_tokens
        end: int = (request.num_computed_tokens + scheduled) // size
        end = min(end, len(request.block_hashes))  # only final tokens have hashes
        if self._answers.holds_back and end > followed.saved:
            if end <= followed.judged:
                return followed.saved
            followed.judged = end
            end = self._answers.blocks(followed, end)
        return end

    @staticmethod
    def _is_foreign(followed: FollowedRequest) -> bool:
        """Whether another connector (in `MultiConnector`) fills pages of the request in this step.

        If that load fails, vLLM sees it in the step's results, and computes the pages again.
        """
        request = followed.request
        ours = followed.loaded == request.num_preemptions
        return not ours and bool(request.num_computed_tokens > followed.local)

    def _blocks(
        self, followed: FollowedRequest, end: int, tables: tuple[list[int], ...]
    ) -> list[BlockSpan]:
        """Return the blocks with KV that were not considered for saving, up to block ``end``."""
        start, followed.saved = followed.saved, end
        hashes = followed.hashes(start, end)
        return [
            _span(at, hashes, tables[at][start:end])
            for at, group in enumerate(self._groups.groups)
            if not group.state
        ]

    def _save(self, followed: FollowedRequest, spans: list[BlockSpan], saves: list[Save]) -> None:
        if self._shared is not None:
            spans = [span.only(self._shared.unknown(span.keys)) for span in spans]
        saves += followed.saves([span for span in spans if span.keys])

    # --- the end ---------------------------------------------------------------------------------

    def finished(self, request: Request, tables: tuple[list[int], ...]) -> None:
        """Forget a request that has ended, and pin its blocks if its options have ``pin``.

        ``tables`` are its pages. What was held back of its answer, and is worth it, is saved in the
        next step, which vLLM runs even if there is nothing to compute.
        """
        followed = self._followed.pop(request.request_id, None)
        if self._choices is not None:
            self._choices.finished(request.request_id)
        if followed is None:
            return
        if followed.lookup is not None:
            self._lookups.forget(followed.lookup)
        if followed.began and not self._resets.is_stale(request.request_id):
            self._save_late(followed, tables)
        self._resets.end(request.request_id)
        if followed.options.pin is not None and followed.saved:
            hashes = followed.hashes(0, followed.saved)
            kept = [
                keys_of(hashes, at)
                for at, group in enumerate(self._groups.groups)
                if not group.state
            ]
            kept += _pinned_states(self._groups, followed)
            self._plan.pins += [(keys, followed.options.pin) for keys in kept]

    def _save_late(self, followed: FollowedRequest, tables: tuple[list[int], ...]) -> None:
        """Plan to save what was held back of an answer, now that its end is known."""
        kept, complete = self._answers.ended(followed)
        if not (
            self._saves
            and followed.options.store
            and self._answers.holds_back
            and followed.ran == followed.request.num_preemptions  # else its pages are not filled
            and self._step >= followed.held
            and followed.request.num_prompt_tokens // self._groups.block_tokens <= followed.saved
        ):
            return
        complete = min(complete, len(tables[0]))
        unread = complete - max(kept, followed.saved)
        if unread > 0:
            self.counts.add(unread_tokens=unread * self._groups.block_tokens)
        kept = min(kept, complete)
        if kept > followed.saved:
            self._save(followed, self._blocks(followed, kept, tables), self._plan.late)

    def clear(self) -> bool:
        """Delete everything in this namespace; False: a tier failed and may still hold blocks.

        Does nothing if the option ``resets`` is false.
        """
        if not self._options.resets:
            _LOG.info('kvkeep keeps what is stored, because the option "resets" is false')
            return True
        for followed in self._followed.values():
            followed.forget_store()
        self._resets.reset()
        self._plan.late.clear()  # else they would be stored after all others were deleted
        self._plan.pins.clear()
        self._generation += 1  # workers in other processes clear their stores in the next step
        return True if self._shared is None else self._shared.clear()

    def close(self) -> None:
        """Release everything; also the store, in case vLLM does not close the worker's side."""
        self._lookups.close()
        if self._shared is not None:
            self._shared.close()


def _span(group: int, hashes: Sequence[bytes], pages: Sequence[int]) -> BlockSpan:
    """Return the blocks that have a page; blocks behind a window have vLLM's null block, 0."""
    span = BlockSpan(group, keys_of(hashes, group), list(pages))
    return span.only([at for at, page in enumerate(pages) if page]) if 0 in pages else span


# --- states --------------------------------------------------------------------------------------
#
# vLLM moves the running state of a request from page to page, and keeps it at few ends of blocks:
# at the last one in a prompt, and where prompts branch. In the step that computes such an end it
# says in which page the state is (``boundary_state_offloads``); later that page may hold another
# state. So a state is saved in that step or not at all.


def _states_of_step(
    groups: Groups,
    followed: FollowedRequest,
    end: int,
    offered: KVConnectorBlockState,
    *,
    new: bool,
) -> list[BlockSpan]:
    """Return the states of a request that can be saved in this step, up to block ``end``.

    These are the states that vLLM offers and, if the request is ``new`` in this step, the one that
    it found in its own prefix cache. Notes their positions in ``followed.states``.
    """
    size, request = groups.block_tokens, followed.request
    found: dict[tuple[int, int], int] = {}  # (group, end of a block) → page
    for group, page, tokens in offered.boundary_state_offloads.get(request.request_id, ()):
        if tokens % size == 0:
            found[group, tokens // size] = page
    if new and followed.local and request.num_computed_tokens == followed.local:
        tables = offered.get_block_ids(request.request_id)
        local = followed.local // size
        if tables is not None:
            found |= {(group, local): tables[group][local - 1] for group in groups.states}
    spans = []
    for (group, at), page in found.items():
        if page and at <= end:  # 0 is vLLM's null block
            followed.states.add(at)
            spans.append(BlockSpan(group, keys_of(followed.hashes(at - 1, at), group), [page]))
    return spans


def _pinned_states(groups: Groups, followed: FollowedRequest) -> list[list[bytes]]:
    """Return the keys of the request's states, those of one group and position in each list."""
    return [
        keys_of(followed.hashes(at - 1, at), group)
        for at in sorted(followed.states)
        for group in groups.states
    ]


def _stop_at_branch(
    request: Request, reach: BlockReach, block_tokens: int, *, first: int, public: int
) -> None:
    """Let vLLM keep a state where the stored KV of other prompts ends: prompts branch there.

    vLLM does so by itself where a prompt branches from one in its own prefix cache. It knows no
    prompts in the store, and without a state at the branch none of them is ever of use.

    All prompts with a public prefix branch at its end. So the first of them leaves a state behind
    its ``public`` blocks, unless one is stored there, or vLLM goes on behind ``first`` later ones.
    """
    branch = reach.covered * block_tokens
    if max(first, reach.end) < public:
        request.shared_prefix_boundary = public * block_tokens
    elif reach.covered > reach.end and branch > request.shared_prefix_boundary:
        request.shared_prefix_boundary = branch


# By name: vLLM renumbers statuses from release to release.
_STOPPED = "FINISHED_STOPPED"
_OTHERS = {"FINISHED_LENGTH_CAPPED": "length", "FINISHED_REPETITION": "repetition"}


class AnswerEnds:
    """Tells how requests ended, as the classes of `kvkeep.core.returns` need it.

    An answer that ended by itself says with which token, and which mark came before (`stop_after`):
    "stop 151645 after 151658" is a tool call of some models, "stop 151645" is not. Stop texts are
    found in vLLM's front end, which then aborts the request, as it does for a client that leaves:
    both are "unfinished" here.

    Thread safety: the scheduler's thread. Cost: at the first end vLLM's tokenizer is loaded, unless
    the scheduler has it already; then `stop_after`'s.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model = vllm_config.model_config

    def of(self, request: Request) -> Ended:
        """Return how a request ended, and the length of its answer."""
        answer = request.output_token_ids
        status = request.status.name
        stop = _OTHERS.get(status, "unfinished")
        if status == _STOPPED:
            stop = stop_after(answer, self._named) if len(answer) else "stop"
        return Ended(stop, len(answer))

    @cached_property
    def _named(self) -> frozenset[int]:
        """Tokens that were added to the vocabulary by name; none if the tokenizer cannot tell."""
        if self._model.skip_tokenizer_init:
            return frozenset()
        try:  # the import, too: vLLM moves its tokenizers from release to release
            from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415

            tokenizer = cached_tokenizer_from_config(self._model)
            return frozenset(map(int, tokenizer.get_added_vocab().values()))
        except (OSError, ValueError, NotImplementedError, AttributeError, ImportError) as error:
            _LOG.warning("the tokenizer does not tell its added tokens: %.300s", str(error))
            return frozenset()


class AnswerWatch:
    """Follows the conversations of an engine, by its requests' tokens; tenants are cache salts.

    Where the workers' stores are in other processes, as with tensor parallelism, the scheduler
    learns, so all ranks keep the same tokens of answers; `take` has what their tiers must know.

    Answers are held back only where a model's layers are all alike: windows and states need more
    than a block to resume.

    Thread safety: none; it belongs to the scheduler's thread. Cost: 0.1 µs a token of a request,
    twice, and what `BlockReturns` costs.

    Arguments:
        waits: whether tiers order by waits.

    Attributes:
        holds_back: whether part of an answer may not be saved before its end.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        groups: Groups,
        shared: SharedStore | None,
        *,
        waits: bool = False,
    ) -> None:
        self._size = groups.block_tokens
        self._ends = AnswerEnds(vllm_config)
        self.holds_back = len(groups.groups) == 1 and not groups.states
        self._recorder = ReturnRecorder(self._size) if shared is None and waits else None
        self._returns = self._recorder or (
            BlockReturns(self._size) if shared is None else shared.store.returns(self._size)
        )
        self._groups = groups

    def requested(self, followed: FollowedRequest) -> None:
        """Record that a request begins to run."""
        row = _tokens(followed.request)
        if row is not None:
            keys = self._keys(followed, len(row))
            salt = followed.request.cache_salt
            self._returns.requested(row, keys, tenant=salt, public=len(followed.public))

    def blocks(self, followed: FollowedRequest, complete: int) -> int:
        """Return how many of a running request's ``complete`` leading blocks may be saved now.

        Cost: 5 µs.
        """
        request, size = followed.request, self._size
        answer = complete * size - request.num_prompt_tokens
        if answer <= 0:
            return complete
        worth = self._returns.worth(answer, tenant=request.cache_salt)
        return complete if worth >= answer else (request.num_prompt_tokens + worth) // size

    def ended(self, followed: FollowedRequest) -> tuple[int, int]:
        """Record the end of a request; return what of it to keep: blocks, of how many complete.

        Both are 0 for a request that did not answer.
        """
        request, size = followed.request, self._size
        row = _tokens(request)
        if row is None or not request.output_token_ids:
            return 0, 0
        ended, prompt = self._ends.of(request), request.num_prompt_tokens
        answer = len(row) - prompt
        # The last token was never an input of the model; after a preemption, others may wait to be.
        computed = min(len(row) - 1, request.num_computed_tokens)
        complete = min(computed // size, len(request.block_hashes))
        kept = complete
        if self.holds_back:
            worth = self._worth(request, ended, answer)
            if worth < answer:
                kept = min(complete, (prompt + worth) // size)
        keys = self._keys(followed, len(row))
        beside = [
            key
            for at in range(1, len(self._groups.groups))
            for key in keys_of(followed.hashes(0, len(keys)), at)
        ]
        self._returns.ended(
            row,
            keys,
            prompt=prompt,
            ended=ended,
            tenant=request.cache_salt,
            public=len(followed.public),
            beside=beside,
        )
        return kept, complete

    def take(self) -> ReturnNotes:
        """Return what the tiers of workers in other processes must know, since the last call."""
        return [] if self._recorder is None else self._recorder.take()

    def _worth(self, request: Request, ended: Ended, answer: int) -> int:
        first = int(request.output_token_ids[0])
        return self._returns.worth(answer, ended=ended, first=first, tenant=request.cache_salt)

    def _keys(self, followed: FollowedRequest, tokens: int) -> list[bytes]:
        return keys_of(followed.hashes(0, tokens // self._size), 0)


def _tokens(request: Request) -> TokenArray | None:
    """Return the tokens of a request; None if its prompt is embeddings."""
    if request.prompt_token_ids is None:
        return None
    return np.fromiter(request.all_token_ids, np.int32, request.num_tokens)
