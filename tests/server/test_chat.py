"""Chat over HTTP with OpenAI's own client, and what cannot be asked of it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.model

ASK = [{"role": "user", "content": "What does textwrap.dedent do?"}]
GREEDY = {"model": "kvkeep-tiny", "messages": ASK, "temperature": 0, "max_tokens": 12}


def test_an_answer(server):
    answer = server.openai().chat.completions.create(**GREEDY)
    assert answer.choices[0].message.content.startswith("Remove any common leading whitespace")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
