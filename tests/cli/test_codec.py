"""``kvkeep codec``: a basis and figures of the bundled model, tiers that use them, wrong input."""

from __future__ import annotations

import json

import pytest

from kvkeep.cli import main

SMALL = ["--tokens", "3000", "--context", "512"]


@pytest.mark.model
def test_a_basis_is_fitted_and_used(tmp_path, capsys):
    import torch

    from kvkeep.integrations.transformers_basis import Prompts
    from kvkeep.serve.models import bundled_model
    from kvkeep.store.codecs import BlockShape, make_codec
    from kvkeep.store.codecs.basis import load_basis
    from kvkeep.store.identity import model_identity

    out = tmp_path / "basis"
    assert main(["codec", "fit", "--out", str(out), *SMALL, "--nats", "0.02", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    basis = load_basis(out)
    assert said["basis"] == basis.digest.hex()
    assert said["bytes"] == out.stat().st_size
    assert said["model"] == f"kvkeep-tiny ({model_identity(bundled_model())})"
    assert (said["rotated"], said["groups"]) == (True, 2)
    assert 4 < said["ratio"] < 20
    assert 0 < said["nats"] < 0.1

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(bundled_model())("def f(x):\n  return x\n" * 200).input_ids
    prompts = Prompts(model, torch.tensor(ids), context=512)
    codec = make_codec(f"transform:basis={out}", BlockShape("bfloat16", "NHD", prompts.parts))
    ratio, nats = prompts.measure(codec, [0])
    assert ratio > 4
    assert nats < 1


@pytest.mark.model
def test_a_width_below_that_of_a_head_is_told(tmp_path, capsys):
    words = ["--out", str(tmp_path / "basis"), "--tokens", "1600", "--context", "256"]
    assert main(["codec", "fit", *words, "--width", "3"]) == 0
    told = capsys.readouterr().err
    assert "--width 3 is less than a head" in told
    assert "groups have up to 32" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--out FILE is missing"),
        (["--out", "/no/folder/basis"], "there is no folder"),
        (["--out", "x", "--width", "2000"], "--width"),
        (["--out", "x", "--tokens", "100"], "--tokens"),
        (["--out", "x", "--context", "10"], "--context"),
        (["--out", "x", "--text", "/no/text"], "cannot read /no/text"),
    ],
)
def test_wrong_input_is_one_line(options, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["codec", "fit", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.model
def test_a_short_text_and_no_model_are_refused(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("too short")
    out = str(tmp_path / "basis")
    assert main(["codec", "fit", "--out", out, *SMALL, "--text", str(text)]) == 2
    assert "at least 2304 are needed" in capsys.readouterr().err
    assert main(["codec", "fit", "--out", out, *SMALL, "--model", str(tmp_path)]) == 2
    assert "a directory with a config.json is needed" in capsys.readouterr().err
    text.write_bytes(b"\xff\xfe")
    assert main(["codec", "fit", "--out", out, *SMALL, "--text", str(text)]) == 2
    assert "no text in UTF-8" in capsys.readouterr().err


@pytest.mark.model
def test_figures_are_measured_and_used(tmp_path, capsys):
    from kvkeep.store.codecs import BlockShape, make_codec

    out = tmp_path / "figures"
    few = ["--codecs", "raw,int8,int4", "--context", "64", "--prompts", "1"]
    assert main(["codec", "measure", "--out", str(out), *few, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == said
    nats = {one["codec"]: one["nats"] for one in said["codecs"]}
    assert list(nats) == ["raw", "int8", "int4"]
    assert nats["raw"] == 0 < nats["int8"] < nats["int4"] < 0.1
    parts = tuple((heads, dim) for heads, dim in said["parts"])
    shape = BlockShape("bfloat16", "NHD", parts)
    auto = make_codec(f"auto:nats={nats['int8']},figures={out}", shape)
    assert [codec.name for codec, _ in auto.codecs] == ["raw", "lossless", "int8"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--out FILE is missing"),
        (["--out", "/no/folder/figures"], "there is no folder"),
        (["--out", "x", "--prompts", "0"], "--prompts"),
        (["--out", "x", "--context", "0"], "--context"),
        (["--out", "x", "--text", "/no/text"], "cannot read /no/text"),
    ],
)
def test_wrong_input_to_measure_is_one_line(options, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["codec", "measure", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
