"""`KeyAnswers`: by their keys, how much of evicted answers the next prompts contain."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.returns import Returns, Wait

__all__ = ["KeyAnswers"]

_MOST: Final = 1024
_MOST_KEYS: Final = 16
_KEY: Final = 8  # bytes of a key, which is a hash
# Of fewer blocks, too little is known of where a prompt and an answer differ.
_LEAST_KEYS: Final = 4


class KeyAnswers:
    """Compares prompts with the answers before them where these are no longer cached.

    `Returns` learns which part of answers is never read from what a prompt repeats of a cached
    answer. While a policy is followed that evicts answers early, nothing would be learned, and the
    trial of an order by waits would not show what it could do.

    Answers of fewer than four blocks are left out, since blocks are all that is compared.

    Memory: the latest answers that a prompt may continue, as many as a memory has blocks and 1,024
    at most, with the first bytes of 16 keys each: a kilobyte. Cost: about 1 µs a request. Thread
    safety: none.
    """

    def __init__(self, blocks: int = _MOST) -> None:
        self._most = min(_MOST, blocks)
        # The place of an answer, the number of its blocks, and their first keys.
        self._answers: OrderedDict[Wait, tuple[int, int, list[bytes]]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._answers)

    def ended(self, wait: Wait, answer: Sequence[bytes], place: int) -> None:
        """Keep the keys of an answer, whose first block is number ``place`` of its request."""
        if len(answer) >= _LEAST_KEYS:
            keys = [key[:_KEY] for key in answer[:_MOST_KEYS]]
            self._answers[wait] = place, len(answer), keys
            if len(self._answers) > self._most:
                self._answers.popitem(last=False)

    def returned(self, wait: Wait, keys: Sequence[bytes], returns: Returns) -> None:
        """Teach ``returns`` what a prompt of these blocks, which ends ``wait``, has of its answer.

        Where the two differ is known to a block or two; nothing is told of the tokens there.
        """
        place, blocks, answer = self._answers.pop(wait, (0, 0, []))
        if not blocks or not wait.evicted:
            return  # what is cached tells it, by tokens
        count = min(len(answer), len(keys) - place)
        same = 0
        while same < count and keys[place + same][:_KEY] == answer[same]:
            same += 1
        if same == blocks:
            again = until = wait.answer
        elif same == len(answer):  # of the others nothing is known
            again, until = wait.answer * (same - 1) // blocks, wait.answer
        elif same < count and same + 1 < blocks:
            # A block of the answer may begin in the prompt.
            again, until = (wait.answer * at // blocks for at in (max(0, same - 1), same + 1))
        else:
            return
        kind, unsure = wait.answer_kind, until - again
        returns.answers.returned(wait.namespace, kind, wait.answer, again, unsure)
