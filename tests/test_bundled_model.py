"""The shipped model: complete, small, loadable offline, and readable when it speaks."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
import string
import subprocess
import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import pytest

import warm
from kvkeep.core.geometry import KVGeometry
from kvkeep.serve.models import bundled_model

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 6_000_000  # bytes: the whole directory
KINDS = {  # the class of the model, and the layers that keep each kind of KV
    "plain": ("LlamaForCausalLM", {"full": (0, 1, 2, 3)}),
    "hybrid": ("Qwen3NextForCausalLM", {"state": (0, 1, 2), "full": (3,)}),
}
PROMPTS = ("What does textwrap.dedent do?", "Explain: the assert statement", "What is a list?")


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(bundled_model())


@pytest.fixture(scope="module")
def model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)


def answer(model, tokenizer, question: str, document: str = "", longest: int = 64) -> str:
    messages = [{"role": "system", "content": document}] if document else []
    prompt = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    tokens = model.generate(**prompt, max_new_tokens=longest, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def known_share(text: str) -> float:
    """The share of the text's words (three letters and more) that the language reference knows."""
    vocabulary = set(re.findall(r"[a-z]{3,}", " ".join(topics.values()).lower()))
    words = re.findall(r"[a-z]{3,}", text.lower())
    return sum(word in vocabulary for word in words) / len(words) if words else 0.0


def readable(text: str) -> bool:
    """Mostly printable ASCII, several different words, nearly all of them real ones."""
    printable = sum(character in string.printable for character in text) / max(1, len(text))
    distinct = set(re.findall(r"[a-z]{3,}", text.lower()))
    return printable > 0.97 and len(distinct) >= 5 and known_share(text) > 0.8


def test_directory_is_small_and_complete():
    folder = bundled_model()
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "NOTICE",
    }
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= LARGEST


def test_notice_names_data_and_licence():
    notice = (bundled_model() / "NOTICE").read_text(encoding="utf-8")
    for part in ("PSF-2.0", "Python Software Foundation", "standard library", "not good for"):
        assert part in notice


def test_importing_the_module_needs_no_torch():
    code = (
        "import sys, kvkeep.serve.models as m; m.bundled_model(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.model
def test_loads_offline_from_another_directory(tmp_path):
    pytest.importorskip("transformers")
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T;"
        "m = M.from_pretrained(sys.argv[1]); T.from_pretrained(sys.argv[1]);"
        "c = m.config; assert type(m).__name__ == 'LlamaForCausalLM';"
        "assert c.num_key_value_heads < c.num_attention_heads;"
        "assert c.max_position_embeddings >= 8192 and c.tie_word_embeddings"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", code, bundled_model()], check=True, env=environment, cwd=tmp_path
    )


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain words",
        "  two  spaces\n\n\ttab and end \n",
        "def f(x):\n    return x ** 2\n",
        "Grüße, 世界, Ελλάδα, ☃ 🧊 e\u0301",
        "\x00\x07\u200b",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


@pytest.mark.model
def test_special_tokens_are_one_token_each(tokenizer, model):
    for token in ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.model
def test_chat_template_extends_a_dialogue_token_for_token(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|bos|><|system|>Be brief.<|end|><|user|>Hello.<|end|><|assistant|>"
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    messages += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Again."}]
    second = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert second[: len(first)] == first


@pytest.mark.model
@pytest.mark.parametrize("question", PROMPTS)
def test_answers_are_readable(model, tokenizer, question):
    text = answer(model, tokenizer, question)
    assert readable(text), text


@pytest.mark.model
def test_a_question_about_a_known_function_gets_its_docstring(model, tokenizer):
    text = answer(model, tokenizer, "What does textwrap.dedent do?")
    assert text.startswith(inspect.getdoc(textwrap.dedent)[:60])


@pytest.mark.model
def test_answers_after_a_long_document_are_readable(model, tokenizer):
    named = [(f"{m.__name__}.{n}", t) for m in (textwrap, itertools) for n, t in vars(m).items()]
    parts = [f"# {n}\n\n{inspect.getdoc(t)}" for n, t in named if callable(t) and "._" not in n]
    document = "Answer from this document.\n\n" + "\n\n".join(parts)
    assert 1500 < len(tokenizer.encode(document)) < 4096
    for question in ("What does textwrap.indent do?", "What is itertools.chain?"):
        text = answer(model, tokenizer, question, document)
        assert readable(text), text


@pytest.mark.model
def test_a_model_with_random_weights_is_not_readable(model, tokenizer):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    untrained = type(model)(model.config).eval()
    assert not any(readable(answer(untrained, tokenizer, question)) for question in PROMPTS)


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
def test_smoke_training_writes_a_complete_directory(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    script = ROOT / "scripts" / "train_tiny_model.py"
    options = ["--hybrid"] if kind == "hybrid" else []
    done = warm.run(
        [*warm.PYTHON, script, "--smoke", *options, "--out", tmp_path / "model"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert len(re.findall(r"loss \d\.\d+", done.stdout)) == 4  # progress is shown
    (unseen,) = re.findall(r"(\d\.\d+) on entries never seen", done.stdout)
    assert float(unseen) < math.log(512) - 0.25, "it knows no more than that there are 512 tokens"
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert written == {path.name for path in bundled_model().iterdir()}
    architecture, groups = KINDS[kind]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == architecture
    geometry = KVGeometry.from_config(tmp_path / "model")
    assert {group.kind: group.layers for group in geometry.groups} == groups
    notice = (tmp_path / "model" / "NOTICE").read_text(encoding="utf-8")
    assert f"{model.num_parameters():,} parameters" in notice
    assert ("ships with the library" in notice) is (kind == "plain")
