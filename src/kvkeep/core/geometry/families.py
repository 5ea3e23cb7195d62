"""Which model families store one K and one V (or latent) per token and layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.states import STATEFUL

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
    "dots3_note_vision_encoder",
    "electra",
    "embedding_gemma2_text",
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
# Refused by name, "_text" left out; what they keep is of no known kind.
_REFUSED: Final[dict[str, str]] = {
    "axk2": "keeps an index key beside the latent",
    "blt": "keeps KV of bytes and of patches",
    "cpmant": "attends in both directions over its prompt",
    "deepseek_v32": "keeps an index key beside the latent",
    "deepseek_v4": "keeps compressed tokens beside a window",
    "diffusion_gemma": "generates by diffusion, over a canvas that attends in both directions",
    "glm5_next": "keeps an index key beside the latent, and a recurrent state",
    "inkling": "keeps states of convolutions inside its attention",
    "inkling2": "keeps states of convolutions inside its attention",
    "openai-gpt": "keeps no KV cache",
    "qwen4_exp": "keeps an index key beside K and V, and several states in a layer",
    "recurrent_gemma": "keeps a recurrent state in its modules, outside of caches",
    "reformer": "keeps hashes and hidden states",
    "rwkv": "keeps a recurrent state of a form that is not known",
    "xlnet": "keeps hidden states of the text before",
    "xlstm": "keeps a recurrent state of a form that is not known",
    "zaya": "keeps states of convolutions and a delayed value inside its attention",
}
_NOT_GENERATING: Final = re.compile(
    r"For(MaskedLM|\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|CTC)$"
)
# Fields set only by models with layers other than attention → the state that those layers store,
# which is known for the families of `STATEFUL`.
_STATE_MARKS: Final[dict[str, str]] = {
    "state_size": "a recurrent state",
    "mamba_d_state": "a recurrent state",
    "ssm_state_size": "a recurrent state",
    "linear_attn_config": "a recurrent state in some layers",
    "full_attention_interval": "a recurrent state in some layers",
    "layer_group_size": "a recurrent state in some layers",
    "conv_L_cache": "a convolution's state in some layers",
}
# Fields set only by models that store something of no known kind → what that is.
_MARKS: Final[dict[str, str]] = {
    "add_cross_attention": "keys and values of another input",
    "cross_attention_layers": "keys and values of images in some layers",
    "cross_layer_interval": "keys and values of images in some layers",
    "index_head_dim": "an index key beside K and V",
    "indexer_head_dim": "an index key beside K and V",
    "compress_ratios": "compressed tokens",
    "compress_rates": "compressed tokens",
    "use_cla": "K and V that several layers attend over",
}


def check_servable(fields: ConfigFields) -> None:
    """Refuse a model that keeps something of no known kind, or nothing.

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
    base = fields.base_family
    if base in _REFUSED:
        raise UnsupportedModel(
            f"{family} {_REFUSED[base]}; K and V or a latent of each token, and states of known "
            "families are supported"
        )
    marks = _MARKS if base in STATEFUL else _STATE_MARKS | _MARKS
    for mark, kept in marks.items():
        if fields.flag(mark):
            raise UnsupportedModel(f"{family} keeps {kept} (it sets {mark})")
