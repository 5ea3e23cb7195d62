"""A runner whose memory holds prefixes instead of numbers, and which asserts all that it reads.

Its logits depend on the tokens alone. So an engine over it gives the tokens of `alone`, or fails at
the pass that would have read a wrong page, row or state.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import torch

from kvkeep.core.groups import GroupLayout, RowCopy, StateCopy

VOCABULARY = 12


_LOGITS = np.random.default_rng(0).normal(size=(5, VOCABULARY, VOCABULARY))


def logits_of(length: int, token: int) -> np.ndarray:
    """Logits behind ``length`` tokens, of which ``token`` is the last.

    Mostly periodic, so that some drafts are right and some wrong.
    """
    return _LOGITS[length // 16 % len(_LOGITS), token]


def alone(prompt, count: int) -> list[int]:
    """The ``count`` greedy tokens behind ``prompt``."""
    tokens = list(map(int, prompt))
    for _ in range(count):
        tokens.append(int(logits_of(len(tokens), tokens[-1]).argmax()))
    return tokens[-count:]


class SymbolicRunner:
    """Stands in for a `Runner` of a model with the groups of ``layout``."""

    identity = "symbolic"
    vocabulary = VOCABULARY
    end_tokens = frozenset()
    device = torch.device("cpu")

    def __init__(self, num_pages: int, layout: GroupLayout, longest: int) -> None:
        self.num_pages, self.layout = num_pages, layout
        self.page_size = layout.page_size
        self.max_tokens = longest
        self.geometry = SimpleNamespace(bytes_per_token=0)
        self.plan = SimpleNamespace(pages_for=self.pages_for)
        self.tensors = self
        self.groups = None
        self.prefixes: dict[tuple[int, int], int] = {}  # prefix, next token → prefix
        self.before = [0]  # of each prefix, the one without its last token
        self.base: dict[tuple[int, int], int] = {}  # page, offset → prefix
        self.rows: dict[tuple[int, int], tuple] = {}  # page, offset → window, place, prefix
        self.states: dict[int, tuple] = {}  # page → number, prefix
        self.computed = 0
        self._cache = None

    def pages_for(self, tokens: int) -> int:
        size = self.page_size
        pages = -(-tokens // size)
        rows = sum(
            min(pages, -(-spec.span // size) + 1) * spec.pages for spec in self.layout.windows
        )
        return pages + rows + self.layout.state_pages

    def check_model(self) -> None:
        pass

    def serve(self, cache) -> None:
        self._cache = weakref.ref(cache)

    def serves(self, cache) -> bool:
        return self._cache() is cache

    def longer(self, prefix: int, token: int) -> int:
        """Return the number of a prefix with one more token; the empty prefix is 0."""
        if (prefix, token) not in self.prefixes:
            self.prefixes[prefix, token] = len(self.before)
            self.before.append(prefix)
        return self.prefixes[prefix, token]

    def wipe(self, page: int) -> None:
        """Forget what a page held: something else is written to it."""
        for memory in (self.base, self.rows):
            for offset in range(self.page_size):
                memory.pop((page, offset), None)
        self.states.pop(page, None)

    def copy(self, copies) -> None:
        for copy in copies:
            if isinstance(copy, StateCopy):
                for src, dst in zip(copy.src.tolist(), copy.dst.tolist(), strict=True):
                    found = self.states.get(src)
                    self.wipe(dst)
                    if found is not None:
                        self.states[dst] = found
                continue
            rows = isinstance(copy, RowCopy)
            memory = self.rows if rows else self.base
            src = copy.src.tolist() if rows else [copy.src]
            dst = copy.dst.tolist() if rows else [copy.dst]
            for a, b in zip(src, dst, strict=True):
                found = [memory.get((a, offset)) for offset in range(copy.tokens)]
                self.wipe(b)
                for offset, one in enumerate(found):
                    if one is not None:
                        memory[b, offset] = one

    def forward(self, pieces) -> torch.Tensor:
        logits = []
        for piece in pieces:
            prefix = self.read(piece)
            for at in range(piece.start, piece.stop):
                token = int(piece.tokens[at - piece.start])
                prefix = self.longer(prefix, token)
                self.write(piece, at, prefix)
                if at >= piece.stop - piece.outputs:
                    logits.append(logits_of(at + 1, token))
            if piece.state is not None:
                for number, page in enumerate(piece.state.tolist()):
                    self.wipe(page)
                    self.states[page] = (number, prefix)
            self.computed += len(piece.tokens)
        return torch.tensor(np.array(logits).reshape(-1, VOCABULARY), dtype=torch.float32)

    def read(self, piece) -> int:
        """Return the prefix that a piece continues, as all its memory says."""
        start, size = piece.start, self.page_size
        if not start:
            return 0
        page, offset = divmod(start - 1, size)
        last = self.base[int(piece.pages[page]), offset]
        firsts = [
            start // spec.span * spec.span if spec.chunked else max(0, start - spec.span + 1)
            for spec in self.layout.windows
        ]
        prefix = last
        for at in reversed(range(start)):
            page, offset = divmod(at, size)
            assert self.base[int(piece.pages[page]), offset] == prefix, f"KV of token {at}"
            for window, (first, table) in enumerate(zip(firsts, piece.rows, strict=True)):
                for place, part in enumerate(table[page].tolist() if at >= first else ()):
                    found = self.rows.get((part, offset))
                    assert found == (window, place, prefix), f"the row of token {at}"
            prefix = self.before[prefix]
        assert prefix == 0
        if piece.state is not None:
            for number, page in enumerate(piece.state.tolist()):
                assert self.states.get(page) == (number, last), f"the state at {start}"
        return last

    def write(self, piece, at: int, prefix: int) -> None:
        page, offset = divmod(at, self.page_size)
        self.states.pop(int(piece.pages[page]), None)
        self.base[int(piece.pages[page]), offset] = prefix
        for window, table in enumerate(piece.rows):
            for place, part in enumerate(table[page].tolist()):
                assert part >= 0, f"no row for token {at}"
                self.states.pop(part, None)
                self.rows[part, offset] = (window, place, prefix)
