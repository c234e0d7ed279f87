"""Runs the command until its configuration is checked: composed, converted, taken or refused."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import NoReturn
from unittest.mock import patch

from hydra._internal.hydra import Hydra

from llama_ssp import cli
from llama_ssp.config import RunConf, validation
from llama_ssp.config.validation import check_sharing

MEANT = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LLAMA_SSP_DEBUG")


class Door:
    """Takes command lines. Returns the exit code, what was written to standard error, and the runs taken."""

    def __init__(self) -> None:
        self._runs: list[RunConf] = []

    def __call__(self, words: list[str]) -> tuple[int, str, list[RunConf]]:
        self._runs = []
        logging.root.handlers.clear()
        errors, code = io.StringIO(), 0
        with (
            patch.object(sys, "argv", ["llama-ssp", *words]),
            patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO())),
            redirect_stdout(io.StringIO()),
            redirect_stderr(errors),
        ):
            try:
                cli.main()
            except SystemExit as left:
                code = int(left.code or 0)
        return code, errors.getvalue(), self._runs

    def _through(self, run: RunConf, words: list[str]) -> NoReturn:
        check_sharing(run, words)
        self._runs.append(run)
        sys.exit(0)

    @contextmanager
    def open(self) -> Iterator[Door]:
        for name in MEANT:
            os.environ.pop(name, None)
        with (
            patch.object(Hydra, "get_mode", lambda *_, **__: None),  # composes all again; the flags decide
            patch.object(validation, "check_sharing", self._through),
            patch.object(logging, "basicConfig", lambda **_: None),
        ):
            yield self
