"""Pages of an engine such as vLLM: full ones are found by tokens, and the oldest is given away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

PAGE = 4


@dataclass(eq=False)
class Running:
    """A request with pages; ``computed`` tokens of ``tokens`` have their KV there."""

    id: str
    salt: str
    tokens: list[int]
    prompt: int
    cached: int
    table: list[int]
    computed: int = 0
    registered: int = 0

    def names(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name of each full page: all tokens up to its end, and the salt."""
        return [
            (self.salt, tuple(self.tokens[:end])) for end in range(PAGE, self.computed + 1, PAGE)
        ]


@dataclass
class PagedEngine:
    """``free`` has the pages that no request uses, the next to be given away first."""

    pages: int
    by_name: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    name_of: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    free: OrderedDict[int, None] = field(default_factory=OrderedDict)
    ever: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = OrderedDict.fromkeys(range(1, self.pages))  # page 0 is none

    def find(self, salt: str, prompt: list[int]) -> list[int]:
        """The pages that hold the beginning of a prompt, never all of it."""
        found = []
        for end in range(PAGE, len(prompt), PAGE):
            page = self.by_name.get((salt, tuple(prompt[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def take(self, count: int) -> list[int] | None:
        """New pages; what they held is forgotten."""
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            name = self.name_of.pop(page, None)
            if name is not None:
                del self.by_name[name]
            self.users[page] = 1
        return taken

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            self.free.pop(page, None)
            self.users[page] = self.users.get(page, 0) + 1

    def register(self, one: Running) -> None:
        """Full pages are found from now on; of two with the same tokens, the first."""
        for at, name in enumerate(one.names()):
            if at >= one.registered:
                one.registered = at + 1
                self.ever.add(name)
                if name not in self.by_name and one.table[at] not in self.name_of:
                    self.by_name[name] = one.table[at]
                    self.name_of[one.table[at]] = name

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None
