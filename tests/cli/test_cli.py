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
    for command in ("serve", "demo", "size", "tree"):
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
        ["demo", "--max-tokens", "many"],
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
    [["--help"], ["--version"], ["serve", "--help"], ["config", "--help"],
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
    [(["--help"], "_multiarray_umath"), (["config", "--help"], "_multiarray_umath"),
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
def test_a_missing_extra_is_named(missing):
    code = (
        "import sys\n"
        f"for name in [*sys.modules]:\n"
        f"    if name.split('.')[0] in {{'kvkeep', {missing!r}}}: del sys.modules[name]\n"
        f"sys.modules[{missing!r}] = None\n"
        f"from kvkeep.cli import main; sys.exit(main(['demo']))"
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


def test_a_path_that_is_not_there():
    done = run("demo", "--model", "/no/such/model")
    assert_one_clear_line(done, "no model at /no/such/model: no such directory")


def test_a_model_that_is_not_causal(bert):
    done = run("demo", "--model", bert)
    assert_one_clear_line(done, "BertForMaskedLM, which is not a causal language model")


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
def test_wrong_values(arguments, says, capsys):
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvkeep: error: ")
    assert says in line


def test_a_model_without_a_tokenizer(wordless, capsys):
    assert main(["demo", "--model", str(wordless)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvkeep: error: no tokenizer can be loaded from {wordless}")


def test_a_demo_that_does_not_fit(capsys):
    assert main(["demo", "--memory", "1MiB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "use a larger --memory" in line


# --- ends ---


@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_without_a_traceback():
    command = [*KVKEEP, "demo"]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)  # it serves
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_goes_away_is_no_traceback():
    command = [*KVKEEP, "demo", "--max-tokens", "2"]
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
    command = [*KVKEEP, "demo", "--max-tokens", "2", "--json"]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more
            while more := os.read(ours, 4096):
                shown += more
        os.close(ours)
        assert json.load(process.stdout)
    assert process.returncode == 0
    assert b"loading the model" in shown
