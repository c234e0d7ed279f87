"""The command as far as the door: composed, converted, checked. What would follow is left out.

Files of the configuration are read once; everything else is done anew for each input.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn
from unittest.mock import patch

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra

from llama_ssp import cli, config
from llama_ssp.config import RunConf, compose
from llama_ssp.config.validation import cluster
from llama_ssp.config.validation.cluster import check_sharing
from tests.fuzz.overrides import Words, as_written, misdeeds, names_a_folder
from tests.fuzz.trial import Said, Trial, command, ill_said

MEANT = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LLAMA_SSP_DEBUG")


class Door:
    """Takes command lines; tells what was said, and which runs came through."""

    def __init__(self) -> None:
        self._runs: list[RunConf] = []

    def __call__(self, words: tuple[str, ...]) -> tuple[Said, list[RunConf]]:
        self._runs = []
        logging.root.handlers.clear()
        return command(cli.main, list(words)), self._runs

    def _through(self, run: RunConf) -> NoReturn:
        check_sharing(run)
        self._runs.append(run)
        sys.exit(0)

    @contextmanager
    def open(self, needed: bool = True) -> Iterator[Door]:
        if not needed:
            yield self
            return
        config.register()
        load = FileConfigSource.load_config

        @cache
        def read(path: str, config_path: str) -> Any:
            return load(FileConfigSource("file", path), config_path)

        def remembered(source: FileConfigSource, config_path: str) -> Any:
            return copy.deepcopy(read(source.path, config_path))

        for name in MEANT:
            os.environ.pop(name, None)
        with (
            patch.object(FileConfigSource, "load_config", remembered),
            patch.object(Hydra, "get_mode", lambda *_, **__: None),  # composes all again; the flags decide
            patch.object(compose, "register", lambda: None),
            patch.object(cluster, "check_sharing", self._through),
            patch.object(logging, "basicConfig", lambda **_: None),
        ):
            yield self


def tried(door: Door, made: Words) -> Trial:
    """The command line at the door."""
    said, runs = door(made.words)
    wrong = ill_said(said)
    if said.code not in (0, 2) and not names_a_folder(made.words):
        wrong.append(f"exit code {said.code} for a command line: {said.err[-200:]!r}")
    if made.nonsense and said.code == 0:
        wrong.append(f"taken, though {made.nonsense}")
    if made.good is not None:
        if said.code:
            wrong.append(f"good, but refused: {said.err[-300:]!r}")
        wrong += [
            f"not as written: {word}" for word in made.good for run in runs if not as_written(run, word)
        ]
    wrong += [f"let through: {found}" for run in runs for found in misdeeds(run)]
    outcome = "refused, 2" if said.code == 2 else f"exit code {said.code}"
    if not said.code:
        outcome = "taken" if runs else "printed something"
    return Trial(outcome, tuple(wrong), " ".join(map(repr, made.words))[:1000] if wrong else "")
