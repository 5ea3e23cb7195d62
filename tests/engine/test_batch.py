"""Attention over pages against the plainest attention there is, written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkeep.engine.attention import Scoring
from kvkeep.engine.batch import PagedBatch, Piece
from kvkeep.engine.setting import CPU
from kvkeep.geometry import KVGeometry
from kvkeep.pages.tensors import PagedTensors

pytestmark = pytest.mark.model

HEADS, KV_HEADS, DIM = 6, 2, 8
LAYER = 1


class Story:
    """Sequences with random keys and values, the first tokens of which are in pages already."""

    def __init__(self, spans, *, page_size, layout="NHD"):
        """``spans``: (start, stop) of each piece."""
        rng = np.random.default_rng(7)
        torch.manual_seed(7)
        need = [-(-stop // page_size) for _, stop in spans]
        num_pages = sum(need) + 3
        geometry = KVGeometry(2, KV_HEADS, DIM, "float32")
        self.tensors = PagedTensors(geometry, num_pages, page_size, device="cpu", layout=layout)
        self.tensors.k(LAYER).fill_(1e4)  # what nobody wrote must not show
        self.tensors.v(LAYER).fill_(1e4)
        ids = rng.permutation(num_pages).astype(np.int32)
        self.pieces, self.keys, self.values, self.queries = [], [], [], []
        for (start, stop), first in zip(spans, np.cumsum([0, *need]), strict=False):
            pages = ids[first : first + -(-stop // page_size)]
            self.pieces.append(Piece(np.zeros(stop - start, np.int32), start, pages))
            self.keys.append(torch.randn(stop, KV_HEADS, DIM))
            self.values.append(torch.randn(stop, KV_HEADS, DIM))
            self.queries.append(torch.randn(stop - start, HEADS, DIM))
            if start:
                slots = self.tensors.slots(pages, 0, start)
                self.tensors.store(LAYER, slots, self.keys[-1][:start], self.values[-1][:start])

    def attend(self, **how):
        batch = PagedBatch(self.pieces, self.tensors)
        starts = [piece.start for piece in self.pieces]
        return batch.attend(
            LAYER,
            torch.cat(self.queries),
            torch.cat([keys[at:] for keys, at in zip(self.keys, starts, strict=True)]),
            torch.cat([values[at:] for values, at in zip(self.values, starts, strict=True)]),
            window=how.pop("window", None),
            scoring=Scoring(**how),
        )

    def expected(self, *, scale=None, window=None, softcap=None):
        rows = []
        for piece, keys, values, queries in zip(
            self.pieces, self.keys, self.values, self.queries, strict=True
        ):
            for query, position in zip(queries, range(piece.start, piece.stop), strict=True):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(HEADS):
                    group = head * KV_HEADS // HEADS
                    scores = keys[first : position + 1, group] @ query[head]
                    scores = scores * (DIM**-0.5 if scale is None else scale)
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                    rows.append(scores.softmax(-1) @ values[first : position + 1, group])
        return torch.stack(rows).view(-1, HEADS, DIM)


SPANS = {
    "cold": [(0, 11)],
    "hit": [(9, 14)],
    "one token": [(13, 14)],
    "first token": [(0, 1)],
    "decode": [(5, 6), (30, 31), (0, 1), (16, 17)],
    "mixed": [(4, 5), (0, 7), (20, 29), (33, 34), (16, 18)],
}


@pytest.mark.parametrize("how", [{}, {"softcap": 2.0}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_token_sees_its_own_sequence_up_to_itself(spans, page_size, window, how):
    story = Story(spans, page_size=page_size)
    torch.testing.assert_close(
        story.attend(window=window, **how), story.expected(window=window, **how)
    )


@pytest.mark.parametrize("window", [None, 60, CPU.query_rows + 5])
@pytest.mark.parametrize("start", [0, 37])
def test_pieces_longer_than_a_row_of_queries(start, window):
    story = Story([(start, start + CPU.query_rows + 70), (3, 4)], page_size=16)
    torch.testing.assert_close(story.attend(window=window), story.expected(window=window))


def test_the_other_layout():
    story = Story(SPANS["mixed"], page_size=4, layout="HND")
    torch.testing.assert_close(story.attend(window=5), story.expected(window=5))


def test_new_keys_and_values_are_in_their_pages_afterwards():
    story = Story(SPANS["mixed"], page_size=4)
    story.attend()
    for piece, keys, values in zip(story.pieces, story.keys, story.values, strict=True):
        k, v = story.tensors.gather(LAYER, piece.pages, piece.stop)
        assert torch.equal(k, keys)
        assert torch.equal(v, values)


def test_the_row_of_tokens():
    pages = np.array([5, 2], np.int32)
    pieces = [
        Piece(np.array([7, 8, 9], np.int32), 3, pages, outputs=2),
        Piece(np.array([5], np.int32), 0, np.array([3], np.int32), outputs=0),
        Piece(np.array([4], np.int32), 0, np.array([1], np.int32)),
    ]
    tensors = PagedTensors(KVGeometry(1, 1, 2, "float32"), 6, 4, device="cpu")
    batch = PagedBatch(pieces, tensors)
    assert batch.input_ids.tolist() == [[7, 8, 9, 5, 4]]
    assert batch.positions.tolist() == [[3, 4, 5, 0, 0]]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 3 * 4, 1 * 4]
    assert batch.outputs.tolist() == [1, 2, 4]


@pytest.mark.parametrize("outputs", [-1, 3])
def test_a_piece_has_no_more_outputs_than_tokens(outputs):
    with pytest.raises(AssertionError):
        Piece(np.zeros(2, np.int32), 0, np.zeros(1, np.int32), outputs)
