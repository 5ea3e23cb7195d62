"""Which model families store one K and one V (or latent) per token and layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel

if TYPE_CHECKING:
    from kvkeep.core.geometry.fields import ConfigFields

__all__ = ["check_servable"]

# They read the whole text at once and have no KV cache, unless configured as decoders.
_ENCODERS: Final = {
    "albert",
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "convbert",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "megatron-bert",
    "mobilebert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
# No field of their configurations shows why these are refused.
_REFUSED: Final[dict[str, str]] = {
    "blt": "keeps KV of bytes and of patches",
    "mimo_v2_flash": "has more KV heads in sliding layers than in full ones",
    "recurrent_gemma": "keeps a recurrent state in some layers",
    "reformer": "keeps hashes and hidden states",
    "rwkv": "keeps a recurrent state",
    "xlnet": "keeps hidden states of the text before",
    "xlstm": "keeps a recurrent state",
}
_NOT_GENERATING: Final = re.compile(
    r"For(MaskedLM|\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|CTC)$"
)
# Fields set only by models with layers other than attention → the state that those layers store.
_MARKS: Final[dict[str, str]] = {
    "state_size": "a recurrent state",
    "mamba_d_state": "a recurrent state",
    "ssm_state_size": "a recurrent state",
    "linear_attn_config": "a recurrent state in some layers",
    "full_attention_interval": "a recurrent state in some layers",
    "layer_group_size": "a recurrent state in some layers",
    "conv_L_cache": "a convolution's state in some layers",
    "cross_attention_layers": "keys and values of images in some layers",
    "index_head_dim": "an index key beside K and V",
    "indexer_head_dim": "an index key beside K and V",
    "compress_ratios": "compressed tokens",
    "compress_rates": "compressed tokens",
}
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention"}
# Fields with the shape of some layers, and the field with the shape of the rest.
_OTHER_SHAPES: Final[dict[str, str]] = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_key_value_heads": "num_key_value_heads",
}
_PER_LAYER: Final = ("per_layer_config", "num_key_value_heads_per_layer", "block_configs")


def check_servable(fields: ConfigFields) -> None:
    """Refuse a model whose cache is not one K and V, or latent, of one shape in every layer.

    Raises:
        UnsupportedModel: with the reason.
    """
    family = fields.family or "this model"
    if fields.flag("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{family} is an encoder-decoder, whose cross-attention keeps KV of the input too; a "
            "decoder-only model is needed"
        )
    if family in _ENCODERS and not fields.flag("is_decoder"):
        raise UnsupportedModel(f"{family} is an encoder: it keeps no KV cache")
    architectures = fields.texts("architectures")
    if architectures and all(_NOT_GENERATING.search(name) for name in architectures):
        raise UnsupportedModel(f"{', '.join(architectures)} does not generate text")
    if family in _REFUSED:
        raise UnsupportedModel(f"{family} {_REFUSED[family]}; one shape of KV a token is needed")
    for mark, kept in _MARKS.items():
        if fields.flag(mark):
            raise UnsupportedModel(f"{family} keeps {kept} (it sets {mark})")
    for name in ("layer_types", "layers_block_type", "block_types"):
        if other := sorted(set(fields.texts(name)) - _ATTENTION):
            raise UnsupportedModel(
                f"{family} has layers of type {', '.join(other)}; only attention layers keep KV "
                "of every token"
            )
    _check_even(fields, family)


def _check_even(fields: ConfigFields, family: str) -> None:
    for name, common in _OTHER_SHAPES.items():
        if name in fields and fields.value(name) != fields.value(common):
            raise UnsupportedModel(
                f"{family} has layers of different shapes: {name} is {fields.value(name)!r} and "
                f"{common} {fields.value(common)!r}"
            )
    for name in _PER_LAYER:
        if fields.flag(name):
            raise UnsupportedModel(f"{family} has layers of different shapes (it sets {name})")
