"""The tokenizer: byte-level BPE, five special tokens, and the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiny_model.dialogues import Message

__all__ = ["CHAT_TEMPLATE", "END", "SPECIAL_TOKENS", "encode_dialogue", "train_tokenizer"]

BOS, END = "<|bos|>", "<|end|>"
SPECIAL_TOKENS = (BOS, "<|system|>", "<|user|>", "<|assistant|>", END)

# No white space around a turn: a longer dialogue then extends a shorter one token for token,
# which is what lets a prefix cache reuse all of it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, longest: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer over ``texts``; any text round-trips, ``longest`` in tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode_dialogue(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """The tokens of one dialogue as the chat template renders it; a page is bare text."""
    if messages[0].role == "text":
        text = f"{BOS}{messages[0].content}{END}"
    else:
        text = BOS + "".join(f"<|{role}|>{content}{END}" for role, content in messages)
    return list(tokenizer.encode(text, add_special_tokens=False))
