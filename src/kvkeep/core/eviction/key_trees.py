"""`KeyTree`: a pool in miniature, of sampled block keys, under any policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.eviction.base import Entry
from kvkeep.core.eviction.depths import Depths, class_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.eviction.base import EvictionPolicy
    from kvkeep.core.eviction.trials import Asked

__all__ = ["KeyDepths", "KeyRun", "KeyTree"]


class KeyRun(Entry):
    """A run of sampled blocks, stored together; each counts as a page."""

    __slots__ = ("blocks", "children", "parent")

    def __init__(self, blocks: list[Asked], parent: KeyRun | None) -> None:
        super().__init__()
        self.blocks = blocks
        self.parent = parent
        self.children = 0
        self.size = len(blocks)
        self.depth = blocks[0].before if blocks else 0


class KeyTree:
    """A prefix tree over ``size`` sampled keys, from whose leaves ``policy`` evicts.

    As in a pool, only what nothing follows is evicted, a run has one record, and a run that is
    removed passes its record on. So a policy hits here as it does there: the same policy over
    single blocks would keep others, such as the middle of a prompt whose front is gone. ``clock``
    counts events, as the policy does.

    Memory: about 150 bytes a key, and 500 a run. Cost: 2 µs a prompt, and 1 to 2 µs for each run
    that is stored or removed.
    """

    def __init__(self, policy: EvictionPolicy, size: int, clock: Callable[[], int]) -> None:
        self.policy = policy
        self._size = size
        self._clock = clock
        self._count = 0
        self._root = KeyRun([], None)
        self._runs: dict[bytes, KeyRun] = {}  # by their first keys
        self._held: KeyRun = self._root

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""
        chain = blocks[::-1]
        now = self._clock()
        self.policy.begin_at(now)
        end, held = self._hold(chain)
        if held:
            end.hits += 1
            end.last_used = now
        end = self._store(end, chain[held:], now)
        self._release(end)
        return held

    def answered(self, answer: Sequence[Asked], prompt: Sequence[Asked]) -> None:
        """Store sampled blocks of an answer behind those of its prompt, if they are held still."""
        chain = [*reversed(prompt), *reversed(answer)]
        now = self._clock()
        self.policy.begin_at(now)
        end, held = self._hold(chain)
        end.last_used = now
        if held >= len(prompt):
            end = self._store(end, chain[held:], now)
        self._release(end)

    def _hold(self, chain: Sequence[Asked]) -> tuple[KeyRun, int]:
        """Return the run in which the longest held prefix ends, out of its queue; its length."""
        runs, end, held, total = self._runs, self._root, 0, len(chain)
        while held < total:
            run = runs.get(chain[held].key)
            if run is None:
                break
            end, size, blocks = run, run.size, run.blocks
            if held + size <= total and blocks[size - 1].key == chain[held + size - 1].key:
                held += size
                continue
            same = 1
            while same < size and held + same < total:
                if blocks[same].key != chain[held + same].key:
                    break
                same += 1
            held += same
            end = self._split(run, same)
            break
        self._held = end
        if not end.children and end.parent is not None:
            self.policy.discard(end)
        return end, held

    def _split(self, run: KeyRun, at: int) -> KeyRun:
        """Cut a run before its block ``at``; return the new front."""
        if not run.children:
            self.policy.discard(run)
        upper = KeyRun(run.blocks[:at], run.parent)
        upper.children = 1
        self.policy.split(upper, run)
        run.blocks = run.blocks[at:]
        run.size -= at
        run.depth = run.blocks[0].before
        run.parent = upper
        self._runs[upper.blocks[0].key] = upper
        self._runs[run.blocks[0].key] = run
        if not run.children:
            self.policy.add(run)
        return upper

    def _store(self, end: KeyRun, new: Sequence[Asked], now: int) -> KeyRun:
        """Store blocks behind ``end``, which is held; return the run in which they end."""
        count = len(new)
        if not count:
            return end
        self._evict(self._count + count - self._size)
        new = new[: self._size - self._count]  # a prompt larger than the memory
        known = next((at for at, block in enumerate(new) if not block.known), len(new))
        for part in (new[:known], new[known:]):
            if not part:
                continue
            hits = int(part[0].known)
            if end.children or end.parent is None or bool(end.hits) != hits:
                end.children += 1
                end = self._runs[part[0].key] = KeyRun([], end)
                end.depth, end.hits = part[0].before, hits
            end.blocks.extend(part)
            end.size += len(part)
            end.last_used = end.stored = now
            self._count += len(part)
        return end

    def _release(self, end: KeyRun) -> None:
        """Let the run in which a request ended be evicted; and what was held for it."""
        held, self._held = self._held, self._root
        if not held.children and held.parent is not None:
            self.policy.add(held)
        if end is not held:
            self.policy.add(end)

    def _evict(self, count: int) -> None:
        """Remove ``count`` keys, or all that nothing holds if they are fewer."""
        policy = self.policy
        while count > 0:
            run = policy.pop()
            if run is None:
                return
            assert isinstance(run, KeyRun)
            most = min(count, policy.portion(run)) if policy.portions else count
            if most < run.size:
                del run.blocks[-most:]
                run.size -= most
                self._count -= most
                policy.put_back(run)
                count -= most
                continue
            count -= run.size
            self._count -= run.size
            del self._runs[run.blocks[0].key]
            parent = run.parent
            assert parent is not None
            parent.children -= 1
            policy.inherit(parent, run)
            if not parent.children and parent.parent is not None and parent is not self._held:
                policy.add(parent)


class KeyDepths(Depths):
    """`Depths` over runs of sampled blocks, which know their places in the prompt."""

    def _class(self, entry: Entry) -> int:
        assert isinstance(entry, KeyRun)
        return class_of(entry.hits, entry.blocks[-1].before)

    def portion(self, entry: Entry) -> int:
        """Return the blocks of its last class of depth."""
        assert isinstance(entry, KeyRun)
        last, blocks = self._class(entry), entry.blocks
        count = 1
        while count < len(blocks) and class_of(entry.hits, blocks[-count - 1].before) == last:
            count += 1
        return count
