"""`ConversationTable`: which requests continue which conversations, and when they return."""

from __future__ import annotations

import hashlib
import heapq
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import whole
from kvkeep.core.returns import Returns
from kvkeep.serve.router.keys import MAX_TOKENS, PrefixKeys, length_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.returns import Ended, Wait
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.router.prompts import Prompt

__all__ = [
    "BY",
    "ConversationTable",
    "RoutedConversation",
    "RoutedTurn",
    "StopCounts",
]

BY: Final = ("session", "prefix", "key")
"""By what a return is recognised: the client's session, its prompt, its ``prompt_cache_key``."""

_STEP: Final = 64  # tokens between two keys of a prompt that are looked up
_SLACK: Final = 8
"""Tokens at the end of a prompt that may differ in the next one, where the answer begins."""
_LEAST: Final = 8  # tokens that two prompts have in common at least
_MOST_ENDS: Final = 3  # latest prompts of a conversation by which it is recognised
_MOST_STOPS: Final = 32
_MOST_PROBES: Final = 8  # places of a prompt that are compared token by token


@dataclass(slots=True, eq=False)
class _Tenant:
    """The conversations of one tenant, the one used longest ago first."""

    name: bytes
    own: OrderedDict[RoutedConversation, None] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class RoutedConversation:
    """A conversation whose requests have been answered.

    ``home`` is the instance that answered last, ``tokens`` the length of the prompt there (0:
    unknown), and ``wait`` began with the end of that answer, as one of `ConversationTable.stops`.
    """

    tenant: _Tenant
    home: str = ""
    stop: str = ""
    tokens: int = 0
    wait: Wait | None = None
    running: int = 0
    names: set[bytes] = field(default_factory=set)
    ends: deque[tuple[int, int]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class RoutedTurn:
    """A request, and the ``conversation`` that it continues; None: it may begin one.

    ``by`` says how that was found, one of `BY`.
    """

    tenant: bytes
    arrived: float
    tokens: int
    name: bytes | None
    end: tuple[int, int] | None
    """Keys of the prompt without its last tokens: at a multiple of the step, and at its end."""
    conversation: RoutedConversation | None = None
    by: str = ""
    answered: bool = False

    @property
    def home(self) -> str:
        """The instance that answered the conversation's last request; "" if there is none."""
        return "" if self.conversation is None else self.conversation.home


@dataclass(slots=True)
class StopCounts:
    """Answers that ended in one way, and how many of their conversations returned so far."""

    ended: int = 0
    returned: int = 0


class ConversationTable:
    """Follows conversations through the requests of all clients, and learns when they return.

    A request continues a conversation of the same tenant whose session it names, or whose last
    prompt its own extends, or, if its tokens are unknown, whose ``prompt_cache_key`` it has: one
    key may belong to many conversations. A prompt that is not longer than the last one stays with
    its conversation, and is no return. Requests with the same API key and ``cache_salt`` are of
    one tenant. Only requests that an instance answered count: a client without a key for it changes
    nothing here.

    At most ``most`` conversations are followed; beyond, the tenant with the most of them loses the
    one that it used longest ago. What a client names or sends decides about conversations of its
    own tenant only.

    Memory: about 2 KB a conversation, for any length of prompts and names. Cost: 20 µs a request,
    and 2 ns a token of its prompt; learning takes up to 50 ms, once for half as many requests as
    conversations wait. Thread safety: none; for the event loop. Raises `InvalidValue`
    if ``most`` is below 1.
    """

    def __init__(self, most: int = 32_768, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.returns = Returns(whole("most", most, 1))
        self.forgotten = 0
        """Conversations that were dropped because there were too many."""
        self.returned = dict.fromkeys(BY, 0)
        """Returns, by what they were recognised."""
        self.stops: dict[str, StopCounts] = {}
        """Answers by how they ended, "unknown" included; from the 33rd way on as "other"."""
        self._most = most
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._keys = PrefixKeys()
        self._tenants: dict[bytes, _Tenant] = {}
        self._sizes: list[tuple[int, int, _Tenant]] = []  # a heap, the largest tenant first
        self._pushed = 0
        self._followed = 0
        self._names: dict[bytes, RoutedConversation] = {}
        self._ends: dict[int, RoutedConversation] = {}
        self._steps: dict[int, int] = {}  # ends behind each key at a multiple of the step

    def __len__(self) -> int:
        """Return the number of conversations that are followed."""
        return self._followed

    # --- requests ----------------------------------------------------------------------------

    def find(self, prompt: Prompt, credentials: bytes = b"") -> RoutedTurn | None:
        """Return the turn of a request; None if nothing identifies its conversation.

        ``credentials`` are those with which it asks an instance. Changes nothing.
        """
        named = prompt.session or prompt.key
        tokens = prompt.tokens
        if tokens is not None and len(tokens) < _SLACK + _LEAST:
            tokens = None
        if not named and tokens is None:
            return None
        tenant = self._digest(credentials, prompt.salt.encode("utf-8", "surrogatepass"))
        name = None
        if named:
            kind = b"session" if prompt.session else b"key"
            name = self._digest(tenant, kind, named.encode("utf-8", "surrogatepass"))
        turn = RoutedTurn(tenant, self._clock(), 0 if tokens is None else len(tokens), name, None)
        if name is not None and (prompt.session or tokens is None):
            turn.conversation = self._names.get(name)
            turn.by = "session" if prompt.session else "key"
        if tokens is not None:
            found = self._by_prefix(turn, tokens, prompt.model)
            if turn.conversation is None and found is not None and not prompt.session:
                turn.conversation, turn.by = found, "prefix"
        return turn

    def _by_prefix(
        self, turn: RoutedTurn, tokens: TokenArray, model: str
    ) -> RoutedConversation | None:
        """Set the ``end`` of a turn; return the conversation whose last prompt it extends."""
        tokens = tokens[:MAX_TOKENS]
        root = self._keys.root(turn.tenant.hex(), model)
        steps = [root, *self._keys.after(root, tokens, _STEP)]
        length = len(tokens) - _SLACK
        step = steps[length // _STEP]
        rest = tokens[length // _STEP * _STEP : length].tolist()
        turn.end = step, self._keys.after_few(step, rest, len(rest))[0] if rest else step
        probes = 0
        for step in reversed(steps):
            if step not in self._steps:
                continue
            start = length_of(step)
            few = tokens[start : start + _STEP - 1].tolist()
            for key in (*reversed(self._keys.after_few(step, few, 1)), step):
                found = self._ends.get(key)
                if found is not None:
                    return found
            probes += 1
            if probes == _MOST_PROBES:
                break
        return None

    def answered(self, turn: RoutedTurn) -> None:
        """Record that an instance answers the request: its conversation has returned."""
        own = turn.conversation
        if own is None and turn.name is not None and turn.by == "session":
            own = turn.conversation = self._names.get(turn.name)  # another request began it
        if own is not None and own not in own.tenant.own:
            own = None  # it was forgotten meanwhile
        if own is None:
            own = turn.conversation = self._add(turn.tenant)
        elif own.wait is not None and not own.wait.over:  # none of its requests runs
            if turn.by == "prefix" and turn.tokens <= own.tokens:
                self.returns.lost(own.wait, turn.arrived)  # the same again, or beside it: no return
            else:
                self.returns.returned(own.wait, turn.arrived)
                self.returned[turn.by] += 1
                self.stops[own.stop].returned += 1
        own.tenant.own.move_to_end(own)
        own.running += 1
        turn.answered = True
        if turn.name is not None and len(own.names) < len(BY):
            own.names.add(turn.name)
            self._names[turn.name] = own

    def ended(self, turn: RoutedTurn, instance: str, ended: Ended) -> None:
        """Record the end of an answered request at ``instance``; nothing if it was not answered."""
        own = turn.conversation
        if not turn.answered or own is None:
            return
        turn.answered = False
        own.running -= 1
        if own not in own.tenant.own:
            return
        own.home, own.tokens = instance, turn.tokens
        if turn.end is not None:
            self._keep_end(own, turn.end)
        now = self._clock()
        if not own.running:
            answer = ended.tokens or 0
            own.wait = self.returns.began(
                ended, answer, now, before=own.wait, tenant=own.tenant.name
            )
            own.stop = self._stop(ended)
            self.stops[own.stop].ended += 1
        if self.returns.due:
            self.returns.learn(now)

    def _stop(self, ended: Ended) -> str:
        """Return the way to end as which this one counts, with its counts in `stops`."""
        stop = ended.stop or "unknown"
        if stop not in self.stops and len(self.stops) >= _MOST_STOPS:
            stop = "other"
        self.stops.setdefault(stop, StopCounts())
        return stop

    # --- the table ---------------------------------------------------------------------------

    def _add(self, name: bytes) -> RoutedConversation:
        if self._followed == self._most:
            self._forget(next(iter(self._largest().own)))
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
        own = RoutedConversation(tenant)
        tenant.own[own] = None
        self._followed += 1
        self._push(tenant)
        return own

    def _push(self, tenant: _Tenant) -> None:
        if len(self._sizes) > 4 * len(self._tenants) + 64:  # most entries are stale
            self._sizes = [
                (-len(one.own), at, one) for at, one in enumerate(self._tenants.values())
            ]
            heapq.heapify(self._sizes)
            self._pushed = len(self._sizes)
        self._pushed += 1
        heapq.heappush(self._sizes, (-len(tenant.own), self._pushed, tenant))

    def _largest(self) -> _Tenant:
        """Return the tenant with the most conversations. Cost: O(log n), amortised."""
        while True:
            size, _, tenant = self._sizes[0]
            if -size == len(tenant.own):
                return tenant
            heapq.heappop(self._sizes)
            if tenant.own and -size > len(tenant.own):
                self._push(tenant)

    def _forget(self, own: RoutedConversation) -> None:
        tenant = own.tenant
        del tenant.own[own]
        if not tenant.own:
            del self._tenants[tenant.name]
        self._followed -= 1
        self.forgotten += 1
        for name in own.names:
            if self._names.get(name) is own:
                del self._names[name]
        while own.ends:
            self._drop_end(own)
        if own.wait is not None:
            self.returns.lost(own.wait, self._clock())

    def _keep_end(self, own: RoutedConversation, end: tuple[int, int]) -> None:
        if end in own.ends:
            own.ends.remove(end)
        else:
            self._steps[end[0]] = self._steps.get(end[0], 0) + 1
        own.ends.append(end)
        self._ends[end[1]] = own
        if len(own.ends) > _MOST_ENDS:
            self._drop_end(own)

    def _drop_end(self, own: RoutedConversation) -> None:
        step, key = own.ends.popleft()
        if self._ends.get(key) is own:
            del self._ends[key]
        self._steps[step] -= 1
        if not self._steps[step]:
            del self._steps[step]

    def _digest(self, *parts: bytes) -> bytes:
        whole = hashlib.blake2b(key=self._secret, digest_size=16)
        for part in parts:
            whole.update(b"%d:" % len(part))
            whole.update(part)
        return whole.digest()

    # --- figures -----------------------------------------------------------------------------

    @property
    def waiting(self) -> list[RoutedConversation]:
        """The conversations that may return. Cost: O(conversations)."""
        return [
            own
            for tenant in self._tenants.values()
            for own in tenant.own
            if not own.running and own.wait is not None and not own.wait.over
        ]

    def expected(self, seconds: float) -> list[tuple[RoutedConversation, float]]:
        """Return the conversations that wait, with the chance of a return within ``seconds``.

        As learned last; a guess before the first 64 answers. Cost: about 1 µs each.
        """
        waiting = self.waiting
        waits = [own.wait for own in waiting if own.wait is not None]
        return list(zip(waiting, self.returns.within(waits, self._clock(), seconds), strict=True))

    def check(self) -> None:
        """Recount everything and assert that it agrees. Cost: O(conversations)."""
        every = [own for tenant in self._tenants.values() for own in tenant.own]
        assert len(every) == self._followed <= self._most
        assert all(tenant.own for tenant in self._tenants.values())
        assert set(self._ends.values()) <= set(every)
        assert set(self._names.values()) <= set(every)
        steps: dict[int, int] = {}
        for own in every:
            assert own.running >= 0
            assert len(own.ends) <= _MOST_ENDS
            for step, _ in own.ends:
                steps[step] = steps.get(step, 0) + 1
        assert steps == self._steps
