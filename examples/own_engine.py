"""The cache inside an engine of your own: each step of a request, with NumPy as the memory.

    python examples/own_engine.py

The "model" is a running sum, so that its KV can be checked: the KV of a token is the sum of all
tokens up to it. A wrong page gives a wrong answer.
"""

from __future__ import annotations

import numpy as np

from kvkeep import PagedCache, Sequence, page_tables

PAGE_SIZE = 4
cache = PagedCache(num_pages=64, page_size=PAGE_SIZE)
memory = np.zeros((cache.num_pages, PAGE_SIZE), np.int64)  # your KV tensors


def compute(sequence: Sequence, start: int) -> int:
    """Compute the KV of ``tokens[start:]`` behind the KV in the pages; return the next token."""
    for copy in sequence.copies():  # first the page copies, in order
        memory[copy.dst, : copy.tokens] = memory[copy.src, : copy.tokens]
    pages = sequence.pages
    kv = memory[pages[(start - 1) // PAGE_SIZE], (start - 1) % PAGE_SIZE] if start else 0
    for position in range(start, sequence.num_tokens):
        kv += sequence.tokens[position]
        memory[pages[position // PAGE_SIZE], position % PAGE_SIZE] = kv
    sequence.publish()  # other requests can reuse full pages from now on
    return int(kv) % 100


def generate(prompt: list[int], count: int) -> list[int]:
    """Prefill the uncached tokens, then decode one token after another."""
    with cache.open(prompt) as sequence:  # closes on errors, too
        print(f"prompt of {len(prompt)} tokens, {sequence.num_cached} cached")
        token = compute(sequence, sequence.num_cached)
        answer = [token]
        while len(answer) < count:
            sequence.append(token)
            token = compute(sequence, sequence.num_tokens - 1)
            answer.append(token)
    return answer


def best_of_two(prompt: list[int]) -> None:
    """Two continuations of one prefill: pages are shared until one of them writes."""
    with cache.open(prompt) as first:
        compute(first, first.num_cached)
        with first.fork() as second:
            for sequence, token in ((first, 1), (second, 2)):
                sequence.append(token)
                compute(sequence, sequence.num_tokens - 1)
            tables = page_tables([first.pages, second.pages], pad=-1)  # for attention kernels
            assert tables.pages.shape == (2, tables.lengths.max())
            shared = np.intersect1d(*tables.pages)
            print(f"two continuations share {len(shared)} of {len(first.pages)} pages")
            first.truncate(len(prompt))  # remove a rejected draft


document = list(range(1, 31))
cold = generate([*document, 7, 8], 6)
warm = generate([*document, 7, 8], 6)
assert cold == warm
generate([*document, 5], 6)
best_of_two([*document, 9])
cache.check()
stats = cache.stats()
print(f"{stats.hit_rate:.0%} of all prompt tokens reused, {stats.pages_cached} pages cached")
