"""What the commands that run a model share: its arguments, and loading it."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli.numbers import count
from kvkeep.core.errors import require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvkeep.serve.engine import Runner, Tokenizer

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_model_arguments", "choose_threads", "load", "progress"]


def add_model_arguments(parser: argparse.ArgumentParser, *, memory: str) -> None:
    """The model and the memory of its pages; ``memory`` is the default."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        help="a local Hugging Face model directory (default: the tiny model that kvkeep ships)",
    )
    model.add_argument(
        "--memory", metavar="SIZE", default=memory, help=f"for KV pages (default: {memory})"
    )
    model.add_argument(
        "--page-size", metavar="TOKENS", type=count, default=16, help="tokens a page (default: 16)"
    )
    model.add_argument(
        "--device", default="auto", help="torch device (default: the GPU where there is one)"
    )


def load(args: argparse.Namespace, *, dtype: str | None) -> tuple[Runner, Tokenizer]:
    """The model that `add_model_arguments` chose, with its tokenizer, ready to run."""
    choose_threads(args)
    with progress("loading the model"):
        from kvkeep.serve.engine import Runner, Tokenizer  # noqa: PLC0415 - seconds, for torch
        from kvkeep.serve.models import bundled_model  # noqa: PLC0415

        theirs = require("transformers", "transformers").utils.logging
        # It has one of its own, which would write over ours.
        theirs.disable_progress_bar()
        # And a handler, whose lines would stand between ours, which may be JSON.
        theirs.disable_default_handler()
        theirs.enable_propagation()
        path = bundled_model() if args.model is None else args.model
        runner = Runner.load(
            path, memory=args.memory, page_size=args.page_size, device=args.device, dtype=dtype
        )
        return runner, Tokenizer.load(path)


def choose_threads(args: argparse.Namespace) -> None:
    """One thread for the tiny model: several would wait for each other longer than they compute.

    Torch reads this when it is imported. Who has set it already knows better.
    """
    if args.model is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def progress(
    doing: str, *, of: int | None = None, remaining: bool = False
) -> Iterator[Callable[..., object]]:
    """Show on stderr, where that is a terminal, what is being done and how far it is.

    Call what it gives after each of the ``of`` steps, or with a number of them; without a number of
    steps it only moves. ``remaining`` also says how much is done and how long it will take: for
    what takes minutes.
    """
    if not sys.stderr.isatty():
        yield lambda _steps=1: None
        return
    rich = require("rich.progress", "cli")
    console = require("rich.console", "cli").Console(stderr=True)
    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TimeElapsedColumn()]
    if remaining:
        columns[2:] = [rich.TaskProgressColumn(), columns[2], rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(doing, total=of)
        yield partial(shown.advance, task)
