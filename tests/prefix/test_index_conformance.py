"""The contract suite over both kinds of prefix index, and over a naive one to test the suite."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
from naive_index import NaiveIndex
from prefix_suite import PrefixIndexTests

from kvkeep.core.prefix import ChainIndex, RadixIndex

if TYPE_CHECKING:
    from kvkeep.core.eviction import EvictionPolicy


class TestRadixIndex(PrefixIndexTests):
    exact = True

    def make_index(self, page_size: int, policy: EvictionPolicy) -> RadixIndex:
        return RadixIndex(page_size, policy)


class TestChainIndex(PrefixIndexTests):
    def make_index(self, page_size: int, policy: EvictionPolicy) -> ChainIndex:
        return ChainIndex(page_size, policy)


class TestNaiveIndex(PrefixIndexTests):
    """An index that has nothing in common with ours: the suite asks for the contract alone."""

    exact = True

    def make_index(self, page_size: int, policy: EvictionPolicy) -> NaiveIndex:
        return NaiveIndex(page_size, policy)


# --- faults that the suite must find -------------------------------------------------------------


class HoldsNothing(NaiveIndex):
    def again(self, hold):
        return hold


class EvictsOneMore(NaiveIndex):
    def evict(self, count):
        return super().evict(count + 1)


class OneNamespace(NaiveIndex):
    def match(self, symbols, namespace):
        return super().match(symbols, next(iter(self.roots), namespace))


class FirstSibling(NaiveIndex):
    """Takes the first child that begins alike, not the one that does so longest."""

    def match(self, symbols, namespace):
        match = super().match(symbols, namespace)
        if match is not None and match.source is not None:
            head = symbols[len(match.pages) * 4 * self.page_size :][:4]
            first = next(c for c in match.end.children if c.symbols.startswith(head))
            same = [a == b for a, b in zip(first.symbols, symbols[-len(head) :], strict=False)]
            match.source, match.partial_page = first, first.page
            match.partial_tokens = max(1, same.count(True) // 4)
        return match


class LooksAreUses(NaiveIndex):
    def match(self, symbols, namespace):
        match = super().match(symbols, namespace)
        if match is not None and match.end not in self.queued:
            self.policy.used(match.end)
        return match


class ForgetsRecency(NaiveIndex):
    def release(self, hold, *, used=True):
        super().release(hold, used=False)


class PinsAreHolds(NaiveIndex):
    def pin(self, hold, pin, *, hard=False):
        if not hard:
            hold.direct += 1
        super().pin(hold, pin, hard=True)


class PinsAreNothing(NaiveIndex):
    def pin(self, hold, pin, *, hard=False):
        if hard:
            super().pin(hold, pin, hard=True)


class HardPinsAreSoft(NaiveIndex):
    def pin(self, hold, pin, *, hard=False):
        super().pin(hold, pin)
        if hard:
            self.release(hold)


class BrokenPinsAreNotTold(NaiveIndex):
    def remove(self, node):
        page = super().remove(node)
        self.broken.clear()
        return page


class CountsPinnedPagesTwice(NaiveIndex):
    @property
    def num_pinned(self):
        return sum(len(node.path()) for node in self.nodes() if node.pins or node.hard)


class KeepsBothCopies(NaiveIndex):
    def insert(self, hold, symbols, pages, priority):
        for child in hold.children:
            child.symbols = b"\xff" + child.symbols[1:] if len(pages) > 1 else child.symbols
        return super().insert(hold, symbols, pages, priority)


class DropsEverything(NaiveIndex):
    def drop(self, hold, keep):
        return super().drop(hold, 0)


class DropsNothing(NaiveIndex):
    def drop(self, hold, keep):
        self.release(hold)
        return super().evict(0)


class ShortensByOneTooFew(NaiveIndex):
    def shorten(self, hold, pages):
        return super().shorten(hold, min(pages + 1, hold.depth))


class NeverForgetsNamespaces(NaiveIndex):
    @property
    def num_namespaces(self):
        return len(self.spaces) if hasattr(self, "spaces") else 0

    def hold(self, match, namespace, *, used=True):
        self.spaces = getattr(self, "spaces", set()) | {namespace}
        return super().hold(match, namespace, used=used)


class ClearsAllNamespaces(NaiveIndex):
    def clear(self, namespace=None):
        return super().clear(None)


class ProtectsTooMuch(NaiveIndex):
    def protects(self, match):
        return super().protects(match) + 1


class SourceIsNotHeld(NaiveIndex):
    def hold(self, match, namespace, *, used=True):
        hold, source = super().hold(match, namespace, used=used)
        if source is not None:
            source.direct -= 1
            self.settle()
            source = self.again(hold)
        return hold, source


FAULTS = [value for value in globals().values() if isinstance(value, type)
          and issubclass(value, NaiveIndex) and value is not NaiveIndex]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_suite_can_fail(fault: type[NaiveIndex]) -> None:
    suite = TestNaiveIndex()
    suite.make_index = fault
    tests = dict(inspect.getmembers(suite, inspect.ismethod))
    slow = [name for name in tests if "walk" in name or "longest" in name]
    for name in sorted(tests.keys() - slow) + slow[::-1]:  # without hypothesis first
        wanted = inspect.signature(tests[name]).parameters
        given = {"driver": suite.make_driver(2), "count": 3}
        if name.startswith("test_"):
            try:
                tests[name](**{key: given[key] for key in wanted})
            except Exception:  # noqa: BLE001 - a broken index fails in any way
                return
    pytest.fail("no test of the suite found the fault")
