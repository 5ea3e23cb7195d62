"""What is measured, on which sizes, and by which systems; the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CASES", "FULL", "OURS", "QUICK", "SYSTEMS", "Case", "Part", "Sizes", "System", "by_prefixes",
    "by_tiers", "cases",
]  # fmt: skip

Part = Literal["prefixes", "tiers"]
OURS = "kvkeep"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the work is.

    ``conversations`` long prompts are cached, and asked for by turns. ``stored`` are the lengths of
    prompts in tiers, in tokens of ``token_bytes`` (a multiple of 4,096). ``evicted`` pages go from
    ``prompts`` cached prompts of 64 tokens, one prompt from ``many``.
    """

    tokens: int = 32_768
    page: int = 16
    conversations: int = 5
    runs: tuple[int, int, int] = (1, 64, 512)
    prompts: int = 10_000
    evicted: int = 2048
    many: int = 50_000
    stored: tuple[int, int] = (4096, 32_768)
    token_bytes: int = 32_768
    block: int = 256

    @classmethod
    def read(cls, found: dict[str, Any]) -> Sizes:
        """Return the sizes that JSON has as an object."""
        values: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        return cls(**values)

    @property
    def pages(self) -> int:
        """Pages of the long prompt."""
        return self.tokens // self.page


FULL = Sizes()
QUICK = Sizes(
    tokens=2048, conversations=2, runs=(1, 4, 16), prompts=100, evicted=64, many=200,
    stored=(256, 1024), token_bytes=4096,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table.

    ``clock``: "cpu" is the processor time of the process, so that neighbours on the machine count
    less; "wall" where a disk is waited for. ``unit`` is what the line is printed in. All systems do
    it ``times`` in a row, so that the caches of the processor are as warm for each.
    """

    name: str
    title: str
    part: Part
    clock: Literal["cpu", "wall"] = "cpu"
    unit: Literal["µs", "ms"] = "µs"
    times: int = 1

    def printed(self, seconds: float) -> str:
        """Return seconds in the unit of this line."""
        value = seconds * (1e6 if self.unit == "µs" else 1e3)
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class System:
    """One column of a table: a worker in an environment of its own.

    ``module`` has the cases, in a table ``CASES`` by name; it is given ``variant``.
    """

    name: str
    part: Part
    environment: str
    module: str
    variant: str = ""


SYSTEMS = (
    System(OURS, "prefixes", ".venv", "kvkeep_cache"),
    System("vLLM", "prefixes", ".venv-vllm", "vllm_blocks"),
    System("SGLang, Rust", "prefixes", ".venv-sglang", "sglang_trees", "rust"),
    System("SGLang, Python", "prefixes", ".venv-sglang", "sglang_trees", "python"),
    System("SGLang, legacy", "prefixes", ".venv-sglang", "sglang_trees", "legacy"),
    System(OURS, "tiers", ".venv", "kvkeep_store"),
    System("LMCache", "tiers", ".venv-lmcache", "lmcache_engine"),
    System("vLLM offloading", "tiers", ".venv-vllm", "vllm_offload"),
    System("SGLang HiCacheFile", "tiers", ".venv-sglang", "hicache_file"),
)


def _tokens(count: int, sizes: Sizes) -> str:
    size = count * sizes.token_bytes
    return f"{count:,} tokens ({size >> 30} GiB)" if size >> 30 else (
        f"{count:,} tokens ({size >> 20} MiB)"
    )  # fmt: skip


def by_prefixes(
    *,
    match: Callable[[int], Any],
    hit: Any,
    hit_list: Any,
    cold: Any,
    names: Any,
    evict: Callable[..., Any],
) -> dict[str, Any]:
    """Return a system's steps by the names of the cases of prefixes; see `cases`."""
    return {
        **{f"match {at}": match(at) for at in range(len(FULL.runs))},
        "hit": hit,
        "hit list": hit_list,
        "cold": cold,
        "names": names,
        "evict": evict(one=False),
        "evict one": evict(one=True),
    }


def by_tiers(
    *,
    lookup: Any,
    known: Any,
    disk_put: Callable[[int], Any],
    disk_get: Callable[..., Any],
    memory_put: Callable[[int], Any] | None = None,
    memory_get: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Return a system's steps by the names of the cases of tiers; see `cases`."""
    found = {"lookup": lookup, "known": known}
    for at in range(len(FULL.stored)):
        if memory_put is not None:
            found[f"memory put {at}"] = memory_put(at)
        if memory_get is not None:
            found[f"memory get {at}"] = memory_get(at)
        found[f"disk put {at}"] = disk_put(at)
        found[f"disk cached {at}"] = disk_get(at, cached=True)
        found[f"disk cold {at}"] = disk_get(at, cached=False)
    return found


def cases(sizes: Sizes) -> tuple[Case, ...]:
    """Return all lines in order; their names are the same for all sizes."""
    found = [
        Case(
            f"match {at}",
            f"match, full hit, path of {runs} run{'s' * (runs > 1)}",
            "prefixes",
            times=10,
        )
        for at, runs in enumerate(sizes.runs)
    ]
    found += [
        Case("hit", "a cached request, from open to close", "prefixes", times=10),
        Case("hit list", "a cached request whose prompt is a Python list", "prefixes", times=10),
        Case("cold", "a new request, from open to close", "prefixes", times=3),
        Case("names", f"hashes of {sizes.pages:,} pages", "prefixes", times=10),
        Case(
            "evict", f"evict {sizes.evicted:,} pages of {sizes.prompts:,} short prompts", "prefixes"
        ),
        Case("evict one", f"evict one of {sizes.many:,} short prompts", "prefixes", times=10),
        Case("lookup", f"find {sizes.tokens:,} tokens in memory", "tiers", times=10),
        Case("known", f"find {sizes.pages:,} blocks by their keys", "tiers", times=10),
    ]
    for at, count in enumerate(sizes.stored):
        text = _tokens(count, sizes)
        found += [
            Case(f"memory put {at}", f"memory: put {text}", "tiers", unit="ms"),
            Case(f"memory get {at}", f"memory: get {text}", "tiers", unit="ms"),
        ]
    for at, count in enumerate(sizes.stored):
        text = _tokens(count, sizes)
        found += [
            Case(f"disk put {at}", f"disk: put {text}, synced", "tiers", "wall", "ms"),
            Case(
                f"disk cached {at}", f"disk: get {text}, in the page cache", "tiers", "wall", "ms"
            ),
            Case(f"disk cold {at}", f"disk: get {text}, cold", "tiers", "wall", "ms"),
        ]
    return tuple(found)


CASES = cases(FULL)
