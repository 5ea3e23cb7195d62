"""Trials: caches of sampled block keys that show how often a policy would hit."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvkeep.core.eviction.base import Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.eviction.base import EvictionPolicy
    from kvkeep.core.eviction.returns import ReturnAware
    from kvkeep.core.returns import Arrival, Wait

__all__ = ["Asked", "KeyLists", "KeyTrial", "KeyWaits", "Trial"]

# Other conversations that a block is known to be used by.
_EARLIER: Final = 7


class Asked(NamedTuple):
    """A sampled block of a prompt."""

    key: bytes
    known: bool
    """Whether it was requested before."""
    before: int
    """Blocks before it."""


class Trial(Protocol):
    """A cache of sampled keys under one policy."""

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""

    def answered(self, answer: Sequence[Asked], prompt: Sequence[Asked]) -> None:
        """Store sampled blocks of an answer, last to first; they go before those of the prompt."""


class KeyLists:
    """2Q over keys: a share ``probation`` of ``size`` keys was requested once; None is LRU."""

    def __init__(self, probation: float | None, size: int) -> None:
        self._size = size
        self._plain = probation is None
        self._most = size if probation is None else int(probation * size)
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""
        once, again, hits = self._once, self._again, 0
        for key, known, _ in blocks:
            if key in again:
                hits += 1
                again.move_to_end(key)
                continue
            if key in once:
                hits += 1
                del once[key]
                again[key] = None
                continue
            (again if known or self._plain else once)[key] = None
            if len(once) + len(again) > self._size:
                queue = once if len(once) > self._most or not again else again
                queue.popitem(last=False)
        return hits

    def answered(self, answer: Sequence[Asked], prompt: Sequence[Asked]) -> None:
        """Store sampled blocks of an answer; those of the prompt are evicted after them."""
        once, again = self._once, self._again
        new = [block for block in answer if block.key not in once and block.key not in again]
        self.requested(new)
        for key, _, _ in prompt:
            if key in again:
                again.move_to_end(key)
            elif key in once:
                once.move_to_end(key)


class _Key(Entry):
    __slots__ = ("key",)

    def __init__(self, key: bytes, known: bool, before: int) -> None:
        super().__init__()
        self.key = key
        self.size = 1
        self.depth = before
        self.hits = int(known)


class KeyTrial:
    """Any policy over ``size`` keys, each an entry of one page; blocks have one page."""

    def __init__(self, policy: EvictionPolicy, size: int) -> None:
        self.policy = policy
        self._size = size
        self._kept: dict[bytes, _Key] = {}

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""
        policy, kept, hits = self.policy, self._kept, 0
        now = policy.moment
        for key, known, before in blocks:
            entry = kept.get(key)
            if entry is not None:
                hits += 1
                policy.discard(entry)
                entry.hits += 1
            else:
                entry = kept[key] = _Key(key, known, before)
            entry.last_used = now
            policy.add(entry)
            if len(kept) > self._size:
                victim = policy.pop()
                assert isinstance(victim, _Key)
                del kept[victim.key]
        return hits

    def answered(self, answer: Sequence[Asked], prompt: Sequence[Asked]) -> None:
        """Store sampled blocks of an answer; those of the prompt are evicted after them."""
        kept, policy = self._kept, self.policy
        self.requested([block for block in answer if block.key not in kept])
        for key, _, _ in prompt:
            entry = kept.get(key)
            if entry is not None:
                policy.discard(entry)
                policy.add(entry)


class _Group(Entry):
    """Blocks that wait with one conversation, or are held by one request; the last one first.

    ``trial`` holds them. A conversation may have groups in several: a policy that is fitted anew
    begins another trial, and so does a tenant whose policy was forgotten.
    """

    __slots__ = ("blocks", "trial")

    def __init__(self, trial: KeyWaits) -> None:
        super().__init__()
        self.trial = trial
        self.blocks: dict[_Block, None] = {}


class _Block:
    __slots__ = ("earlier", "group", "key")

    def __init__(self, key: bytes, group: _Group) -> None:
        self.key = key
        self.group = group
        self.earlier: tuple[Wait, ...] = ()
        """Waits of other conversations that used it, the latest one last."""


class KeyWaits:
    """An order by waits over ``size`` keys, besides those that running requests hold.

    A block waits with the conversation that used it last. In a tree a run is evicted after all
    runs behind it; so a victim that other conversations wait for, whose waits are worth more, is
    kept for these, alone.

    Memory: about 250 bytes a key. Cost: about 0.6 µs a key, and 5 µs a prompt.
    """

    def __init__(self, policy: ReturnAware, size: int) -> None:
        self.policy = policy
        self._returns = policy.returns
        self._size = size
        self._kept: dict[bytes, _Block] = {}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._kept)

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""
        kept, arrival = self._kept, self._returns.arrival
        before = arrival.before
        running = arrival.held = _Group(self)
        hits = 0
        for key, _, _ in blocks:
            block = kept.get(key)
            if block is None:
                block = kept[key] = _Block(key, running)
            else:
                hits += 1
                group = block.group
                wait = group.wait
                if wait is not None and wait is not before and not wait.over:
                    earlier = [one for one in block.earlier if not one.over and one is not wait]
                    block.earlier = (*earlier[1 - _EARLIER :], wait)
                self._take(block)
                block.group = running
            running.blocks[block] = None
        if before is not None and before.blocks:
            self._leave(before)
        while len(kept) > self._size and len(self.policy):
            self._evict()
        return hits

    def _take(self, block: _Block) -> None:
        """Remove a block from its group."""
        group = block.group
        del group.blocks[block]
        wait = group.wait
        if wait is not None and not group.blocks:
            self.policy.discard(group)
            del wait.blocks[group]

    def _wait(self, group: _Group, wait: Wait) -> None:
        """Let the blocks of a group wait with a conversation."""
        if wait.blocks is None:
            wait.blocks = {}
        wait.blocks[group] = None
        group.wait = wait
        self.policy.add(group)

    def _keep(self, block: _Block, waits: Sequence[Wait], best: Wait) -> None:
        """Keep one block for the best of other ``waits``."""
        group = block.group = _Group(self)
        group.blocks[block] = None
        group.followers = len(waits)
        self._wait(group, best)

    def _leave(self, before: Wait) -> None:
        """Let go what a conversation that returned did not request again."""
        for group in [group for group in before.blocks if group.trial is self]:
            for block in list(group.blocks):
                living = [wait for wait in block.earlier if not wait.over]
                if living:
                    self._take(block)
                    block.earlier = tuple(living[:-1])
                    self._keep(block, living, living[-1])
            if group.blocks:
                self.policy.discard(group)
                self.policy.add(group)  # among what was left behind

    def _evict(self) -> None:
        """Remove blocks of the group that is worth least, the last ones of its prompt first."""
        policy, kept = self.policy, self._kept
        group = policy.pop()
        assert isinstance(group, _Group)
        last = group.wait
        assert last is not None
        here = policy.worth_of(last, group.followers)
        while group.blocks and len(kept) > self._size:
            block = next(iter(group.blocks))
            del group.blocks[block]
            if block.earlier:
                living = [wait for wait in block.earlier if not wait.over]
                block.earlier = ()
                if living:
                    best = max(living, key=lambda wait: policy.worth_of(wait, 1))
                    if policy.worth_of(best, len(living) + 1) > here:
                        self._keep(block, [*living, last], best)
                        continue
            del kept[block.key]
        if group.blocks:
            policy.put_back(group)
        else:
            del last.blocks[group]

    def answered(self, answer: Sequence[Asked], prompt: Sequence[Asked]) -> None:
        """Do nothing: `ended` stores the answer."""

    def ended(
        self, arrival: Arrival, wait: Wait | None, answer: Sequence[Asked], read: int
    ) -> None:
        """Let the blocks of a request, and of its answer, wait with their conversation.

        Blocks of the answer from number ``read`` on are left behind.
        """
        held: _Group | None = arrival.held
        # None of the prompt is in the sample, or it was in that of an earlier trial.
        group = _Group(self) if held is None or held.trial is not self else held
        kept = self._kept
        new: list[_Block] = []
        left = _Group(self)
        for key, _, before in answer:
            if key in kept:
                continue
            block = kept[key] = _Block(key, group if before < read else left)
            if before < read:
                new.append(block)
            else:
                left.blocks[block] = None
        if new:
            group.blocks = {**dict.fromkeys(new), **group.blocks}
        if left.blocks:
            none = self.policy.unknown()
            none.over = True
            self._wait(left, none)
        if group.blocks:
            self._wait(group, wait or self.policy.unknown())
        while len(kept) > self._size and len(self.policy):
            self._evict()
