"""Compiled steps, kept between runs beside inductor's own files: the next start loads them, tracing nothing.

A step is found again by a hash of all that it was made of: versions, the model's layers and config, this
package's code that is traced, the processor and the number of threads. Weights are not in the file.
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
TRACED = (
    "causal_lm.py", "compile.py", "kernels/int8.cpp", "kernels/int8.py", "kernels/linear.cpp",
    "kernels/linear.py", "kv_cache.py", "quantization.py",
)  # fmt: skip


class StepFile:
    """One step of one model, on disk or not yet."""

    def __init__(self, model: Any, kind: tuple[bool, bool]) -> None:
        self._model = model
        known = [
            torch.__version__, transformers.__version__, str(torch.get_num_threads()), processor(),
            *((FOLDER / name).read_text(encoding="utf-8") for name in TRACED),
            str(model.module), model.module.config.to_json_string(use_diff=False), str(model.dtype),
            str(model.device), str(kind),
        ]  # fmt: skip
        name = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
        self.path = Path(cache_dir()) / "llama_ssp" / f"step-{name}.bin"

    def load(self) -> Any | None:
        """The step, ready to be called; None where there is none, or none that still works.

        What is in the file runs: it and its folder have to be this user's own, and nobody else's to write.
        """
        try:
            if not is_ours(self.path):
                return None
            with self.path.open("rb") as file:
                step: Any = torch.compiler.load_compiled_function(file, external_data={"model": self._model})
            step.disable_guard_check()
        except Exception as error:  # whatever torch meets in a file of its own that is not whole
            log.debug("engine: %s: %s: %s", self.path, type(error).__name__, error)
            return None
        return step

    def save(self, step: Any) -> None:
        """Where it cannot be kept, the next start compiles again."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            step.save_compiled_function(str(part), external_data={"model": self._model})
            part.chmod(0o600)
            part.replace(self.path)
        except Exception as error:  # whatever torch finds in a module that it cannot write
            part.unlink(missing_ok=True)
            log.debug("engine: a step of %s is not kept: %s", self._model.name, error)
