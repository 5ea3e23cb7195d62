"""The command line as a user has it: a process, its output, its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import warm
from kvkeep.cli import main
from warm import KVKEEP, PYTHON

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 1_000_000,
    "bos_token_id": None,
    "eos_token_id": None,
}


def run(*arguments, code=None, warmed=True):
    """A process that runs the command, or ``code`` in a new one."""
    command = [*(KVKEEP if code is None else (*PYTHON, "-c", code)), *map(str, arguments)]
    start = warm.run if code is None and warmed else subprocess.run
    return start(command, capture_output=True, text=True, timeout=300, check=False)


def assert_one_clear_line(done, *words):
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvkeep: error: ")
    for word in words:
        assert word in line


# --- without a model -------------------------------------------------------------------------


def test_help_is_quick_because_it_imports_no_torch():
    code = (
        "import sys\n"
        "from kvkeep.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run(code=code)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("generate", "demo", "size", "tree"):
        assert command in done.stdout


def test_the_version():
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvkeep ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sing"],
        ["generate"],
        ["generate", "--prompt", "x", "--max-tokens", "many"],
        ["generate", "--prompt", "x", "--chat", "--raw"],
        ["demo", "--page-size", "1.5"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvkeep: error: ")


SERVERS = {
    "serve": ["serve", "--port", "0", "--memory", "64MiB", "--no-store"],
    "route": ["route", "--port", "0", "--instances", "http://127.0.0.1:1"],
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["serve", "--help"], ["config", "example"],
     ["doctor", "--json", "memory://1MiB"], ["size", "--memory", "1GiB", "--json"],
     *(pytest.param(words, marks=pytest.mark.model) for words in SERVERS.values())],
    ids=" ".join,
)  # fmt: skip
def test_a_full_stdout_is_one_line(words):
    """A server, too, ends: nobody would see where it listens."""
    with Path("/dev/full").open("w") as full:
        done = warm.run([*KVKEEP, *words], stdout=full, stderr=subprocess.PIPE, text=True,
                        timeout=300, check=False)  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvkeep: ")]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "kvkeep: error: cannot write to stdout: No space left on device" in lines


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of libraries")
@pytest.mark.parametrize(
    ("words", "library"),
    [(["--help"], "_multiarray_umath"), (["config", "example"], "_multiarray_umath"),
     (["replay", "x", "--capacity", "1M"], "_multiarray_umath"),
     (SERVERS["route"], "_multiarray_umath"), (SERVERS["serve"], "_multiarray_umath"),
     (SERVERS["serve"], "libtorch"), (["demo"], "libtorch")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)  # fmt: skip
def test_an_interrupt_while_it_starts_is_silent(words, library):
    """While NumPy or PyTorch is imported, where an exception may be swallowed."""
    with subprocess.Popen(
        [*KVKEEP, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while library not in maps.read_text():
            assert process.poll() is None, "it ended before"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["demo"]], ids=lambda c: c[0])
def test_a_missing_extra_is_named(missing, command):
    code = (
        "import sys\n"
        f"for name in [*sys.modules]:\n"
        f"    if name.split('.')[0] in {{'kvkeep', {missing!r}}}: del sys.modules[name]\n"
        f"sys.modules[{missing!r}] = None\n"
        f"from kvkeep.cli import main; sys.exit(main({command!r}))"
    )
    if missing == "torch":  # which would be imported again
        done = run(code=code)
    else:
        done = warm.run(
            [*PYTHON, "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
    assert_one_clear_line(done, f"{missing} is needed here", "pip install 'kvkeep[transformers]'")


# --- what is wrong with a model --------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("bert")
    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wordless(tmp_path_factory):
    """A model without a tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("wordless")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never ends by itself, with a tokenizer."""
    import transformers

    from kvkeep.serve.models import bundled_model

    folder = tmp_path_factory.mktemp("endless")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_model())
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": len(tokenizer)})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_path_that_is_not_there():
    done = run("generate", "--model", "/no/such/model", "--prompt", "x")
    assert_one_clear_line(done, "no model at /no/such/model: no such directory")


def test_a_model_that_is_not_causal(bert):
    done = run("generate", "--model", bert, "--prompt", "x")
    assert_one_clear_line(done, "BertForMaskedLM, which is not a causal language model")


def test_a_prompt_longer_than_the_pool():
    done = run("generate", "--memory", "64KiB", "--prompt", "word " * 100)
    assert_one_clear_line(done, "prompt 0: it has", "tokens and the pool holds 32", "more memory")


@pytest.mark.parametrize("command", ["generate --prompt x", "demo"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/no/such/model"], "no such directory"),
        (["--memory", "much"], "no amount of memory"),
        (["--memory", "10B"], "holds no page"),
        (["--memory", "8EiB"], "page"),
        (["--page-size", "0"], "page_size"),
        (["--device", "abacus"], "no torch device"),
    ],
    ids=" ".join,
)
def test_wrong_values(command, arguments, says, capsys):
    assert main([*command.split(), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvkeep: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--dtype", "int4"], "dtype is one of"),
        (["--raw", "--prompt", "\udcff"], "not valid Unicode"),
    ],
    ids=ascii,
)
def test_wrong_values_of_generate(arguments, says, capsys):
    assert main(["generate", "--prompt", "x", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_model_without_a_tokenizer(wordless, capsys):
    assert main(["generate", "--model", str(wordless), "--prompt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvkeep: error: no tokenizer can be loaded from {wordless}")


def test_a_demo_that_does_not_fit(capsys):
    assert main(["demo", "--memory", "1MiB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "use a larger --memory" in line


# --- generate --------------------------------------------------------------------------------

ENDLESS = ["generate", "--raw", "--prompt", "Return", "--max-tokens", "1000000"]
ASK = ["generate", "--memory", "16MiB", "--max-tokens", "12"]
ASK += ["--prompt", "What does textwrap.dedent do?"]


def generate_json(capsys, *arguments):
    assert main([*ASK, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.model
def test_generate_prints_the_text_and_says_what_it_took():
    done = run(*ASK, warmed=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    (figures,) = done.stderr.splitlines()
    assert "prompt tokens, 0 reused; 12 generated (length)" in figures


@pytest.mark.model
def test_generate_as_json(capsys):
    (one,) = generate_json(capsys)["completions"]
    assert one["prompt"] == "What does textwrap.dedent do?"
    assert len(one["tokens"]) == 12
    assert one["finish_reason"] == "length"
    assert 0 < one["ttft_s"] < one["seconds"]


@pytest.mark.model
def test_prompts_of_one_call_share_unless_told_not_to(capsys):
    longer = ["--prompt", "What does textwrap.dedent do? " * 8] * 2
    shared = generate_json(capsys, *longer)
    alone = generate_json(capsys, *longer, "--no-cache")
    assert [one["cached_tokens"] > 0 for one in shared["completions"]] == [False, False, True]
    assert [one["cached_tokens"] for one in alone["completions"]] == [0, 0, 0]
    for one, other in zip(shared["completions"], alone["completions"], strict=True):
        assert one["tokens"] == other["tokens"]
    assert alone["cache"]["pages_cached"] == 0 < shared["cache"]["pages_cached"]


@pytest.mark.model
def test_several_prompts_are_printed_in_their_order(capsys):
    assert main([*ASK, "--prompt", "What is json?"]) == 0
    out, err = capsys.readouterr()
    assert out.index("> What does textwrap.dedent do?") < out.index("> What is json?")
    assert len(err.splitlines()) == 2


@pytest.mark.model
def test_raw_and_chat_are_different_prompts(capsys):
    chat, raw = generate_json(capsys, "--chat"), generate_json(capsys, "--raw")
    default = generate_json(capsys)
    assert chat["completions"][0]["prompt_tokens"] > raw["completions"][0]["prompt_tokens"]
    assert default["completions"][0]["tokens"] == chat["completions"][0]["tokens"]


@pytest.mark.model
def test_a_seed_reproduces(capsys):
    drawn = [
        generate_json(capsys, "--temperature", "1.5", "--seed", seed)["completions"][0]["tokens"]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.model
def test_a_stop_text_ends(capsys):
    (whole,) = generate_json(capsys)["completions"]
    stop = whole["text"].split()[1]
    (cut,) = generate_json(capsys, "--stop", stop)["completions"]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_without_a_traceback(endless):
    command = [*KVKEEP, *ENDLESS, "--model", str(endless)]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)  # it generates
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_goes_away_is_no_traceback(endless):
    command = [*KVKEEP, *ENDLESS, "--model", str(endless)]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, err) == (1, "")


@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="terminals")
def test_on_a_terminal_progress_is_shown():
    import pty

    ours, theirs = pty.openpty()
    with warm.Popen([*KVKEEP, *ASK, "--json"], stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more
            while more := os.read(ours, 4096):
                shown += more
        os.close(ours)
        assert json.load(process.stdout)
    assert process.returncode == 0
    assert b"loading the model" in shown
