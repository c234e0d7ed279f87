"""Compiled steps on disk, in inductor's cache folder: the next start loads them and traces nothing.

A step is named by a hash of all that it was made from: versions, the model's layers and config, the code of
this package that is traced, the processor and the number of threads. Weights are not in the file.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._inductor.runtime.cache_dir_utils import cache_dir

from llama_ssp.models.kernels.build import is_ours, processor

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
TRACED = [FOLDER / f"{name}.py" for name in ("causal_lm", "compile", "families", "kv_cache", "quantization")]
TRACED += [FOLDER / "kernels" / f"{name}.{kind}" for name in ("int8", "linear") for kind in ("cpp", "py")]


class StepFile:
    """The file of one step of one model, which may not exist yet."""

    def __init__(self, model: Any, kind: tuple[bool, bool]) -> None:
        self._model = model
        config = model.module.config.to_json_string(use_diff=False)
        versions = torch.__version__, transformers.__version__, torch.get_num_threads(), processor()
        parts = *versions, model.module, config, model.dtype, model.device, kind
        code = [file.read_text(encoding="utf-8") for file in TRACED]
        name = hashlib.sha256("\0".join([*map(str, parts), *code]).encode()).hexdigest()[:16]
        self.path = Path(cache_dir()) / "llama_ssp" / f"step-{name}.bin"

    def load(self) -> Any | None:
        """The step, ready to be called; None if there is none that works.

        What is in the file is run: only this user may be able to write it and its folder.
        """
        try:
            if not is_ours(self.path):
                return None
            with self.path.open("rb") as file:
                step: Any = torch.compiler.load_compiled_function(file, external_data={"model": self._model})
            step.disable_guard_check()
        except Exception as error:  # whatever torch raises for a file that is not whole
            log.debug("engine: %s: %s: %s", self.path, type(error).__name__, error)
            return None
        return step

    def save(self, step: Any) -> None:
        """Writes the step; if that fails, the next start compiles again."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            step.save_compiled_function(str(part), external_data={"model": self._model})
            part.chmod(0o600)
            part.replace(self.path)
        except Exception as error:  # whatever torch finds in a module that it cannot write
            part.unlink(missing_ok=True)
            log.debug("engine: a step of %s is not kept: %s", self._model.name, error)
