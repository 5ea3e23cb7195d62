"""`PagedTensors`: the memory of the pages, on any torch device."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np

from kvkeep.core.errors import InvalidValue, require, whole
from kvkeep.core.geometry import format_bytes

require("torch", "torch")
import torch  # noqa: E402 - after `require`, which says what to install

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import SupportsIndex

    import numpy.typing as npt
    from torch import Tensor

    from kvkeep.core.geometry import KVGeometry

    Copy = tuple[int, int, int]  # (src, dst, tokens), as `PageCopy`
    Integers = Sequence[int] | npt.NDArray[np.integer] | Tensor

__all__ = ["Gather", "Layout", "PagedTensors", "Places", "Scratch", "zero_pages"]

Layout = Literal["NHD", "HND"]

# Elements are moved as integers of their width: every bit pattern survives, and torch supports
# integers in operations where it does not support 8-bit floats.
_CARRIERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# A larger gather takes fresh memory: computing on it takes longer than allocating.
_SCRATCH: Final = 64 << 20  # bytes
_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class PagedTensors:
    """K and V (or the latent) of every layer, for a fixed number of pages, zero at first.

    A page is contiguous: layer after layer, K and then V of each, each [page_size, heads, dim]
    ("NHD") or [heads, page_size, dim] ("HND"). So a page is read, written or copied as a whole,
    while `k` and `v` of one layer are views whose pages lie a page apart, which paged attention
    kernels take as a stride.

    The alternative, layer by layer, was measured on one CPU core with the geometry of Llama-3.1-8B
    (bfloat16, pages of 16 tokens, 2 MiB each; best of 150). Gathering 128 scattered pages of one
    layer, K and V, costs the same: 0.59 ms here, 0.55 ms there. Reading 16 scattered pages into one
    block takes 2.7 ms here and 3.7 ms there (7.0 ms as one gather and a transposition), writing
    them back 2.9 ms and 3.4 ms. And a page on its way to the host or a disk is one piece here, and
    64 there.

    With a latent geometry K is the stored vector and V its leading part, not stored again.

    Page ids, slots and copies are sequences, NumPy arrays or integer tensors. Wrong ids, shapes,
    dtypes and devices raise `InvalidValue` before anything is written. Checking ids on a GPU waits
    for the stream; ``check_ids=False`` skips that, and checks ids on the host only.

    Thread safety: none. On CUDA everything is queued on the current stream, in the order of calls.

    Args:
        geometry: the model's KV; of one rank where tensor-parallel ranks share it.
        num_pages: the number of pages; ids are 0 … num_pages-1.
        page_size: tokens a page.
        device: a torch device, or its name.
        layout: the order inside a page; the methods give the same results with both.
        check_ids: see above.
        memory: uint8 [pages, page_bytes] to use instead of new memory, such as the first bytes of
            larger pages: bytes of a page are contiguous, pages may lie apart.

    Raises:
        UnsupportedModel: the geometry is not plain: its layers differ.
        InvalidValue: another argument is wrong.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_pages: SupportsIndex,
        page_size: SupportsIndex,
        *,
        device: str | torch.device = "cpu",
        layout: Layout = "NHD",
        check_ids: bool = True,
        memory: Tensor | None = None,
    ) -> None:
        if layout not in get_args(Layout):
            raise InvalidValue(f"layout is {layout!r}; 'NHD' and 'HND' are known")
        geometry.needs_plain("PagedTensors")
        self.geometry = geometry
        self.num_pages = whole("num_pages", num_pages, 1)
        self.page_size = whole("page_size", page_size, 1)
        self.layout = layout
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self.page_bytes = geometry.bytes_per_page(self.page_size)
        self._carrier = _CARRIERS[self.dtype.itemsize]
        # Tensors made in inference mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            if memory is None:
                memory = zero_pages(self.num_pages, self.page_bytes, device)
            else:
                _check_memory(memory, self.num_pages, self.page_bytes)
            self._elements = memory.view(self._carrier)
            # A GPU moves eight bytes as fast as one.
            wide = self.page_bytes % 8 == 0 and self._elements.stride(0) % 8 == 0
            self._rows = self._elements.view(torch.int64) if wide else self._elements
            self._keys, self._values = self._views()
        self._layers = (
            self._keys.unbind(1),
            None if geometry.latent_dim is not None else self._values.unbind(1),
        )
        self.device = self._elements.device
        self._check_ids = check_ids or self.device.type == "cpu"
        # A GPU makes many small copies in one kernel; on a CPU one memcpy a page is fastest.
        self._batched = self.device.type != "cpu"

    def __repr__(self) -> str:
        return (
            f"PagedTensors({self.num_pages} pages of {self.page_size} tokens, {self.layout}, "
            f"{self.dtype}, {format_bytes(self.nbytes)} on {self.device})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def k(self, layer: int) -> Tensor:
        """Return K of a layer, a view: [pages, page_size, heads, dim] in "NHD" order.

        In "HND" order [pages, heads, page_size, dim]. With a latent geometry, the stored vectors.
        """
        return self._seen(self._keys, layer)

    def v(self, layer: int) -> Tensor:
        """Return V of a layer, as `k`; with a latent geometry the head of the stored vectors."""
        return self._seen(self._values, layer)

    def slots(self, page_table: Integers, start: int, stop: int) -> Tensor:
        """Return the slots of tokens ``start`` … ``stop - 1`` of a sequence: int64 [stop - start].

        A slot is ``page * page_size + offset``. O(stop - start).
        """
        start = whole("start", start, 0)
        stop = whole("stop", stop, start)
        if stop > len(page_table) * self.page_size:
            raise InvalidValue(
                f"tokens {start} … {stop} are not within a table of {len(page_table)} pages of "
                f"{self.page_size} tokens"
            )
        first = start // self.page_size
        pages = self._pages(page_table[first : -(-stop // self.page_size)])
        tokens = torch.arange(start, stop, device=self.device) - first * self.page_size
        return pages[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def store(
        self, layer: int, slots: Integers | Places, k: Tensor, v: Tensor | None = None
    ) -> None:
        """Write ``k`` [tokens, heads, dim] and ``v`` at ``slots`` of one layer.

        For slots that are used in many layers, call `prepare_store` first. Omit ``v`` with a latent
        geometry. Dtype and device must be those of the memory: rounding is for the caller to
        decide. If a slot is given twice, either token may stay.
        """
        places = slots if isinstance(slots, Places) else self.prepare_store(slots)
        latent = self.geometry.latent_dim is not None
        if (v is None) != latent:
            raise InvalidValue(
                "the latent is stored once: leave v out" if latent else "v is needed beside k"
            )
        layer = self._layer(layer)
        parts = (
            [("k", k, self._keys)] if v is None else [("k", k, self._keys), ("v", v, self._values)]
        )
        for name, tensor, memory in parts:
            self._check_tokens(name, tensor, (len(places.pages), *memory.shape[-2:]))
        for _, tensor, memory in parts:
            memory[:, layer].index_put_(places, tensor.detach().view(self._carrier))

    def prepare_store(self, slots: Integers) -> Places:
        """Check ``slots`` once, for `store` in any number of layers."""
        index = self._integers("slots", slots, self.num_pages * self.page_size)
        return Places(index // self.page_size, index % self.page_size)

    def gather(self, layer: int, pages: Integers, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of K and V of a sequence's first ``length`` tokens: [length, heads, dim].

        Contiguous, except V of a latent geometry, which is a view of K. Only pages of these tokens
        are read. Cost: the bytes returned, at the speed of scattered reads; "HND" is transposed on
        the way, which takes up to 1.5 times as long on a CPU.
        """
        length = whole("length", length, 0)
        if length > len(pages) * self.page_size:
            raise InvalidValue(
                f"length is {length}; a table of {len(pages)} pages of {self.page_size} tokens "
                f"holds 0 … {len(pages) * self.page_size}"
            )
        gather = self.prepare_gather(pages[: -(-length // self.page_size)], self.scratch())
        gather.fill(self._layer(layer))
        return gather.keys[:length], gather.values[:length]

    def scratch(self) -> Scratch:
        """Return new, empty memory for gathers to share."""
        return Scratch(self._carrier, self.device)

    def prepare_gather(self, pages: Integers, scratch: Scratch) -> Gather:
        """Return a gather of all tokens of ``pages``, for any layer, in ``scratch``'s memory.

        Unlike `gather`, it checks ids once and allocates no memory per layer.
        """
        value_dim = self._values.shape[-1]
        return Gather(self._layers, self._pages(pages), scratch, self.dtype, value_dim)

    def copy(self, copies: Iterable[Copy]) -> None:
        """Make copies (src, dst, tokens): the first ``tokens`` of a page, in every layer.

        In order, so a copy reads what an earlier one wrote; the rest of ``dst`` is unchanged. Cost:
        one memory copy each on a CPU (two, for K and V, of a partial page); on a GPU one gather and
        one scatter for all copies that do not depend on each other.
        """
        checked = [copy for copy in map(self._checked, copies) if copy[0] != copy[1]]
        if not self._batched:
            for src, dst, tokens in checked:
                for memory in self._leading(tokens):
                    memory[dst].copy_(memory[src])
            return
        for wave in _independent(checked):
            pairs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for src, dst, tokens in wave:
                pairs[tokens].append((src, dst))
            for tokens, both in pairs.items():
                sources, targets = torch.tensor(both, device=self.device).unbind(1)
                for memory in self._leading(tokens):
                    memory.index_copy_(0, targets, memory.index_select(0, sources))

    def read(self, pages: Integers, *, out: Tensor | None = None) -> Tensor:
        """Read pages into one block: uint8 [pages, page_bytes], in new memory or in ``out``.

        A block only fits memory of the same geometry, page size and layout. ``out`` may be on the
        host and pinned. Cost: one gather. New memory is expensive on a CPU, as the kernel hands out
        its pages first: 32 MiB take 3 ms into a reused ``out``, and 17 ms or more without.
        """
        index = self._pages(pages)
        if out is None:
            return self._rows.index_select(0, index).view(torch.uint8)
        self._check_block("out", out, len(index), {self.device.type, "cpu"})
        if out.device == self.device and len(index) and self._is_aligned(out):
            torch.index_select(self._rows, 0, index, out=out.view(self._rows.dtype))
        else:
            out.copy_(self._rows.index_select(0, index).view(torch.uint8))
        return out

    def write(self, pages: Integers, block: Tensor) -> None:
        """Write a block from `read` into pages, not necessarily the same ones.

        The block may be on the host. Each page may be given once. Cost: on a CPU one memory copy
        per run of neighbouring pages, on a GPU one transfer and one scatter.
        """
        index = self._pages(pages)
        self._check_block("block", block, len(index), {self.device.type, "cpu"})
        if self._check_ids and len(np.unique(index.cpu())) < len(index):
            raise InvalidValue("a page is given twice; give each page once")
        if not len(index):
            return  # an empty block may have strides that no view allows
        block = block.to(self.device)
        rows = (block if self._is_aligned(block) else block.clone()).view(self._rows.dtype)
        if self._batched:
            self._rows.index_copy_(0, index, rows)
            return
        ids = index.numpy()
        ends = (np.flatnonzero(np.diff(ids) != 1) + 1).tolist()  # of runs of neighbours
        for start, stop in itertools.pairwise([0, *ends, len(ids)]):
            page = int(ids[start])
            self._rows[page : page + stop - start].copy_(rows[start:stop])

    def _views(self) -> tuple[Tensor, Tensor]:
        """Return K and V of all layers, [pages, layers, page_size, heads, dim] in either layout."""
        heads, width = self.geometry.rank_heads, self.geometry.head_dim
        layers = self._elements.view(self.num_pages, self.geometry.layers, -1)
        split = self.page_size * heads * width
        keys = self._shaped(layers[..., :split], width)
        if self.geometry.latent_dim is not None:
            return keys, keys[..., : self.geometry.latent_dim]
        return keys, self._shaped(layers[..., split:], self.geometry.value_dim)

    def _shaped(self, part: Tensor, width: int) -> Tensor:
        heads, layers = self.geometry.rank_heads, part.shape[:2]
        if self.layout == "NHD":
            return part.view(*layers, self.page_size, heads, width)
        return part.view(*layers, heads, self.page_size, width).transpose(2, 3)

    def _seen(self, memory: Tensor, layer: int) -> Tensor:
        view = memory[:, self._layer(layer)].view(self.dtype)
        return view if self.layout == "NHD" else view.transpose(1, 2)

    def _leading(self, tokens: int) -> tuple[Tensor, ...]:
        """Return the memory of the first ``tokens`` of every page, in as few pieces as possible."""
        if tokens == self.page_size:
            return (self._rows,)
        if self.geometry.latent_dim is not None:
            return (self._keys[:, :, :tokens],)
        return self._keys[:, :, :tokens], self._values[:, :, :tokens]

    def _is_aligned(self, block: Tensor) -> bool:
        """Whether the bytes can be viewed as words, given address and storage offset."""
        word = self._rows.itemsize
        return block.data_ptr() % word == 0 and block.storage_offset() % word == 0

    def _layer(self, layer: int) -> int:
        if whole("layer", layer, 0) >= self.geometry.layers:
            raise InvalidValue(f"layer is {layer}; there are 0 … {self.geometry.layers - 1}")
        return layer

    def _pages(self, pages: Integers) -> Tensor:
        return self._integers("page ids", pages, self.num_pages)

    def _integers(self, name: str, values: Integers, limit: int) -> Tensor:
        """Return one row of integers below ``limit``, as int64 on the device."""
        if isinstance(values, torch.Tensor):
            index = values
        else:
            try:
                array = np.asarray(values)
            except ValueError as error:
                raise InvalidValue(f"{name} are one row of whole numbers: {error}") from error
            if array.dtype.kind not in "iu" and array.size:
                raise InvalidValue(f"{name} are whole numbers, got {array.dtype}")
            index = torch.from_numpy(array.astype(np.int64))
        if index.dim() != 1 or index.dtype not in _INTEGERS:
            raise InvalidValue(
                f"{name} are one row of whole numbers, got {index.dtype} of shape "
                f"{tuple(index.shape)}"
            )
        if len(index) and (self._check_ids or index.device.type == "cpu"):
            low, high = (int(bound) for bound in index.aminmax())
            if low < 0 or high >= limit:
                raise InvalidValue(f"{name} lie in 0 … {limit - 1}, got {low} … {high}")
        return index.to(self.device, torch.int64)

    def _checked(self, copy: Copy) -> Copy:
        """Return a copy as plain integers."""
        try:
            src, dst, tokens = map(operator.index, copy)
        except (TypeError, ValueError):
            src = dst = tokens = -1
        most = self.num_pages
        if not (0 <= src < most and 0 <= dst < most and 0 < tokens <= self.page_size):
            raise InvalidValue(
                f"{copy!r} is no copy here; (src, dst, tokens) are two pages of 0 … {most - 1} and "
                f"1 … {self.page_size} tokens"
            )
        return src, dst, tokens

    def _check_tokens(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        given = (tuple(tensor.shape), tensor.dtype, tensor.device)
        wanted = (shape, self.dtype, self.device)
        if given != wanted:
            raise InvalidValue(
                f"{name} is {given[0]}, {given[1]} on {given[2]}; {wanted[0]} [tokens, heads, dim],"
                f" {wanted[1]} on {wanted[2]} is needed"
            )

    def _check_block(self, name: str, block: Tensor, pages: int, devices: set[str]) -> None:
        shape = (pages, self.page_bytes)
        if (
            tuple(block.shape) != shape
            or block.dtype != torch.uint8
            or not block.is_contiguous()
            or block.device.type not in devices
        ):
            raise InvalidValue(
                f"{name} is {tuple(block.shape)}, {block.dtype} on {block.device}"
                f"{'' if block.is_contiguous() else ', not contiguous'}; contiguous {shape} "
                f"[pages, page_bytes], torch.uint8 on {' or '.join(sorted(devices))} is needed"
            )


# A model stores the same tokens and gathers the same pages layer after layer. To check ids, split
# slots and allocate memory takes longer than to store a token, so all layers share what follows.


class Places(NamedTuple):
    """Slots split into int64 ``pages`` and ``offsets`` [tokens], for `PagedTensors.store`."""

    pages: Tensor
    offsets: Tensor


class Scratch:
    """Memory that gathers of K and V share.

    Fresh memory is expensive on a CPU, as the kernel hands out its pages first: gathering 16 MiB
    takes 2 ms into reused memory and 2 to 26 ms into fresh memory. Grows to the largest gather so
    far, 64 MiB at most; a larger `Gather` has memory of its own.

    Thread safety: none. All gathers that share a scratch overwrite each other.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._memory.nbytes

    def take(self, elements: int) -> Tensor:
        """Return uninitialised memory for ``elements``, valid until the next call."""
        if elements <= len(self._memory):
            return self._memory[:elements]
        # A tensor made in inference mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            fresh = torch.empty(elements, dtype=self._memory.dtype, device=self._memory.device)
        if fresh.nbytes <= _SCRATCH:
            self._memory = fresh
        return fresh


class Gather:
    """Pages whose K and V are gathered layer after layer, into the same memory.

    ``keys`` and ``values`` are [tokens, heads, dim], for all tokens of the pages in order. They
    hold the result of the last `fill`, until another gather with the same scratch is filled.
    """

    __slots__ = ("_index", "_k", "_layers", "_v", "keys", "values")

    def __init__(
        self,
        layers: tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None],
        index: Tensor,
        scratch: Scratch,
        dtype: torch.dtype,
        value_dim: int,
    ) -> None:
        """``layers`` are K and V of every layer, [pages, page_size, heads, dim].

        V is None where it is the leading ``value_dim`` of each K and not stored again.
        """
        self._layers = layers
        self._index = index
        shapes = [(len(index), *part[0].shape[1:]) for part in layers if part is not None]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = torch.split(scratch.take(sum(sizes)), sizes)
        self._k, *rest = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        self._v = rest[0] if rest else None
        self.keys = self._k.view(dtype).flatten(0, 1)
        values = self._k if self._v is None else self._v
        self.values = values.view(dtype).flatten(0, 1)[..., :value_dim]

    def fill(self, layer: int) -> None:
        """Gather the pages of ``layer``. Cost: the bytes, at the speed of scattered reads."""
        keys, values = self._layers
        # Indexing with brackets takes five times as long on a CPU.
        torch.index_select(keys[layer], 0, self._index, out=self._k)
        if values is not None:
            assert self._v is not None
            torch.index_select(values[layer], 0, self._index, out=self._v)


def zero_pages(num_pages: int, page_bytes: int, device: str | torch.device) -> Tensor:
    """Return new memory for pages: uint8 [num_pages, page_bytes], all zero.

    Raises:
        InvalidValue: an unknown device, or one without room.
    """
    shape = (num_pages, page_bytes)
    try:
        if torch.device(device).type == "cpu":
            # Untouched zero pages cost nothing; torch would write them all.
            return torch.from_numpy(np.zeros(shape, np.uint8))
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError, MemoryError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidValue(
            f"no memory for {num_pages} pages ({format_bytes(num_pages * page_bytes)}) on "
            f"{device}: {reason}"
        ) from error


def _check_memory(memory: Tensor, num_pages: int, page_bytes: int) -> None:
    wanted = (num_pages, page_bytes)
    if memory.dtype != torch.uint8 or tuple(memory.shape) != wanted or memory.stride(1) != 1:
        raise InvalidValue(
            f"memory is {tuple(memory.shape)} of {memory.dtype}; uint8 {wanted} [pages, "
            "page_bytes] is needed, the bytes of a page contiguous"
        )


def _independent(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Split copies, in order, into groups in which no copy touches a page another one writes."""
    group: list[Copy] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for copy in copies:
        src, dst, _ = copy
        if src in targets or dst in targets or dst in sources:
            yield group
            group, sources, targets = [], set(), set()
        group.append(copy)
        sources.add(src)
        targets.add(dst)
    if group:
        yield group
