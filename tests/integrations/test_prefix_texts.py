"""Public prefixes as texts and chats, in engines that have a tokenizer of Transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvkeep import InvalidValue
from kvkeep.integrations.vllm.public import PrefixTexts
from kvkeep.serve.engine import Tokenizer
from kvkeep.serve.models import bundled_model

CHAT = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}]


def test_texts_and_chats_are_what_our_server_makes_of_them() -> None:
    transformers = pytest.importorskip("transformers")
    loaded = []

    def load() -> object:
        loaded.append(transformers.AutoTokenizer.from_pretrained(bundled_model()))
        return loaded[-1]

    texts, ours = PrefixTexts(load), Tokenizer.load(bundled_model())
    assert not loaded
    assert texts.encode("Once upon a time") == ours.encode("Once upon a time").tolist()
    assert texts.chat(CHAT) == ours.chat(CHAT).tolist()
    assert len(loaded) == 1
    with pytest.raises(InvalidValue, match="template refuses"):
        texts.chat([{"role": "nobody"}])


def test_an_engine_without_a_tokenizer_or_template_takes_token_ids() -> None:
    with pytest.raises(InvalidValue, match="give lists of token ids"):
        PrefixTexts(lambda: None).encode("text")
    with pytest.raises(InvalidValue, match="no chat template"):
        PrefixTexts(lambda: SimpleNamespace(chat_template=None)).chat(CHAT)
