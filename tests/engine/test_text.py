"""Text that grows token by token: whole characters, stop texts, and nothing lost."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.serve.engine.text import GrowingText, Tokenizer

BYTES = {
    symbol: index
    for index, symbol in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
}
TEXTS = ["plain", "naïve café", "日本語のテキスト", "🙂👩‍👩‍👧 mixed ✓", "a\n\n  b\tc", " leading"]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, so that a character of several bytes arrives in parts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=BYTES, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


@pytest.fixture(scope="module")
def words():
    """Tokens are words with a leading space, which is dropped at the beginning of a text."""
    vocabulary = {"▁the": 0, "▁cat": 1, "▁sat": 2, "ting": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁the"))
    made.decoder = tokenizers.decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


def grown(tokenizer, tokens, stop=()):
    """The text, what was shown along the way, and how many tokens it took."""
    text = GrowingText(tokenizer, stop)
    shown = []
    for token in tokens:
        shown.append(text.add(int(token)))
        if text.stopped:
            break
    shown.append(text.finish())
    assert "".join(shown) == text.text
    return text.text, shown


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_in_whole_characters(tokenizer, text):
    whole, shown = grown(tokenizer, tokenizer.encode(text))
    assert whole == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
    assert len(shown) == len(text.encode()) + 1


def test_spaces_between_words_stay(words):
    assert grown(words, [0, 1, 2, 3])[0] == words.decode([0, 1, 2, 3]) == "the cat satting"
    assert grown(words, [0, 1, 2, 3])[1][:2] == ["the", " cat"]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    whole, shown = grown(tokenizer, tokenizer.encode("é")[:1])
    assert whole == "\N{REPLACEMENT CHARACTER}"
    assert shown == ["", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (("END",), "one "),
        (("zwei", "END"), "one "),
        (("END", "ne"), "o"),
        (("one END two",), ""),
        (("o",), ""),
        (("Ending",), "one END two END"),
        (("two END!",), "one END two END"),
    ],
)
def test_text_ends_before_the_first_stop_text(tokenizer, stop, kept):
    whole, shown = grown(tokenizer, tokenizer.encode("one END two END"), stop)
    assert whole == kept
    assert "".join(shown) == kept  # no letter of a stop text was shown


def test_what_may_begin_a_stop_text_is_held_back(tokenizer):
    _, shown = grown(tokenizer, tokenizer.encode("EENx"), ("END",))
    assert shown == ["", "E", "", "ENx", ""]


@pytest.mark.parametrize("stop", ["é", "日本"])
def test_stop_texts_of_many_bytes(tokenizer, stop):
    assert grown(tokenizer, tokenizer.encode(f"x{stop}y"), (stop,))[0] == "x"


# --- any tokens ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled():
    from kvkeep.serve.models import bundled_model

    return Tokenizer.load(bundled_model())


@pytest.fixture(scope="module")
def pieces():
    """Tokens are pieces of text, and bytes by name if there is no piece, as in Llama 2."""
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    vocabulary += [("▁", -1.0), ("▁the", -1.0), ("cat", -1.0), ("é", -1.0), ("a", -2.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    steps = tokenizers.decoders
    made.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"))


def hard_tokens(tokenizer: Tokenizer, size: int) -> st.SearchStrategy[list[int]]:
    """Any tokens, with bytes and parts of characters as likely as all others together."""
    known = range(size)
    bytes_ = [one for one in known if any(sign >= 0x80 for sign in tokenizer.token_bytes(one))]
    return st.lists(st.sampled_from(bytes_) | st.sampled_from([*known, size + 5]), max_size=40)


@given(data=st.data())
def test_any_tokens_grow_to_the_text_of_all_of_them(bundled, data):
    tokens = data.draw(hard_tokens(bundled, 4096))
    whole = bundled.decode(tokens)
    assert grown(bundled, tokens)[0] == whole
    places = st.integers(0, max(0, len(whole) - 1))
    stop = [whole[at : at + data.draw(st.integers(1, 4))] for at in data.draw(st.lists(places))]
    stop = [one for one in stop if one][:4]
    text, _ = grown(bundled, tokens, stop)
    assert whole.startswith(text)
    assert not any(one in text for one in stop)
    assert (text == whole) == (not stop)
    if stop:
        assert any(whole.startswith(one, len(text)) for one in stop)


def test_each_token_of_the_vocabulary_is_its_text(bundled):
    for token in range(4096):
        assert grown(bundled, [token])[0] == bundled.decode([token]), token


@given(tokens=st.lists(st.integers(0, 262), max_size=30))
def test_pieces_and_bytes_lose_nothing(pieces, tokens):
    """Each invalid byte becomes one replacement character, however many come together."""
    text = grown(pieces, tokens)[0]
    whole = pieces.decode(tokens)
    if "\N{REPLACEMENT CHARACTER}" not in whole:
        assert text == whole


def steps_of(tokenizer, tokens, monkeypatch) -> list[int]:
    """How many tokens are decoded for each of ``tokens``."""
    steps = [0]
    for name in ("decode", "decoded_bytes"):
        before = getattr(Tokenizer, name)

        def counted(self, given, before=before):
            steps[-1] += len(given) if isinstance(given, list) else 1
            return before(self, given)

        monkeypatch.setattr(Tokenizer, name, counted)
    text = GrowingText(tokenizer, ("zzz",))
    for token in tokens:
        steps.append(0)
        text.add(int(token))
    monkeypatch.undo()
    return steps[1:]


@pytest.mark.parametrize("which", ["bundled", "tokenizer", "pieces"])
def test_a_token_costs_a_few_tokens_whatever_came_before(which, request, monkeypatch):
    """Bytes that never become a character, emoji completed by the next token, plain text."""
    made = request.getfixturevalue(which)
    alone = [one for one in range(300) if made.token_bytes(one) == b"\x80"][:1] * 2000
    halves = [one for one in range(300) if made.token_bytes(one) in (b"\xf0", b"\x9f")] * 1000
    for tokens in (alone, halves, [*halves, *alone]):
        assert tokens
        steps = steps_of(made, tokens, monkeypatch)
        assert max(steps) <= 100
        assert sum(steps[-100:]) <= 1.5 * sum(steps[100:200])


def test_special_tokens_between_the_bytes_of_a_character_are_left_out(bundled):
    start = next(one for one in range(300) if bundled.token_bytes(one) == b"\xc3")
    end = next(one for one in range(300) if bundled.token_bytes(one) == b"\xa9")
    assert grown(bundled, [start, *[0] * 500, end])[0] == "é" == bundled.decode([start, 0, end])


def test_the_longest_token_is_the_longest(bundled, tokenizer, pieces):
    for made, size in ((bundled, 4096), (tokenizer, 256), (pieces, 262)):
        longest = max(len(made.token_bytes(token)) for token in range(size))
        assert longest <= made.longest_token <= max(longest, len("<0xFF>"), len("<unk>"))


# --- one token -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, bundled, text):
    for one in (tokenizer, bundled):
        tokens = [token for token in one.encode(text).tolist() if token != 0 or one is tokenizer]
        assert b"".join(map(one.token_bytes, tokens)) == text.encode()


def test_all_bytes_have_a_sign(tokenizer):
    assert sorted(map(tokenizer.token_bytes, BYTES.values())) == [bytes([b]) for b in range(256)]


def test_tokens_of_text_stand_for_it_with_its_space(words):
    assert [words.token_bytes(token) for token in (0, 1, 3)] == [b" the", b" cat", b"ting"]


def test_single_bytes_among_tokens_of_text():
    vocabulary = {"▁x": 0, "<0xE2>": 1, "<0x0A>": 2, "<0xZZ>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁x"))
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    )
    one = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))
    found = [one.token_bytes(token) for token in range(4)]
    assert found == [b" x", b"\xe2", b"\n", b"<0xZZ>"]


def test_special_tokens_stand_for_their_names(bundled):
    assert bundled.token_bytes(0) == b"<|bos|>"


def test_ids_without_a_token_stand_for_nothing(bundled):
    assert bundled.token_bytes(4_000_000) == b""


# --- chat ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('turns must alternate') }}",
        "{{ messages[7].content }}",
        "{% for %}",
        "{{ messages[0].content + 1 }}",
        "{{ 'x'.encode().nothing() }}",
    ],
)
def test_a_template_that_refuses_is_the_callers_mistake(bundled, monkeypatch, template):
    monkeypatch.setattr(bundled._tokenizer, "chat_template", template)
    with pytest.raises(InvalidValue, match="chat template refuses"):
        bundled.chat([{"role": "user", "content": "hello"}])


def test_chat_needs_a_template(tokenizer):
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidValue, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_what_is_no_text_is_refused(tokenizer):
    with pytest.raises(InvalidValue, match="not valid Unicode"):
        tokenizer.encode("\udcff")


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(UnsupportedModel, match="no tokenizer can be loaded"):
        Tokenizer.load(tmp_path)
