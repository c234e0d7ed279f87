"""The inputs of a run, after all checks that need no model. No torch."""

from dataclasses import dataclass
from pathlib import Path

from llama_ssp.config import RunConf
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.tasks.machine.finding import MachineCheck
from llama_ssp.text.prompts import Reading
from llama_ssp.text.written_texts import WrittenTexts


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The config, its pairs, and the prompts as text; `place` is a sweep's folder for the run.

    `words` are the overrides that the user gave, with their keys in full. `texts` are those to replay.
    `machine` is what was found on this machine, where the task is to check it.
    """

    run: RunConf
    seed: int
    pairs: tuple[PairSpec, ...]
    reading: Reading
    texts: WrittenTexts | None = None
    place: Path | None = None
    words: tuple[str, ...] = ()
    machine: MachineCheck | None = None
