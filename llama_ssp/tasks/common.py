"""What every task shares: its inputs, its pair, and what it prints and draws."""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

import torch

from llama_ssp.config import Output, TaskConf
from llama_ssp.distributed.comm import Ranks
from llama_ssp.distributed.gpus import gpus_here
from llama_ssp.errors import DistributedError
from llama_ssp.models.host_memory import process_bytes
from llama_ssp.pair.session import PairSession
from llama_ssp.placing.pairs import PairSpec
from llama_ssp.placing.prediction import COUNTED, DEVICE, HELD_BYTES, RESERVED, TENSORS, Bytes, RunMeasurement
from llama_ssp.report.console import Console, Item
from llama_ssp.report.plots import plot
from llama_ssp.report.run_folder import RunFolder
from llama_ssp.speculative.state import Prompt
from llama_ssp.tasks.inputs import RunInputs
from llama_ssp.text.prompts import TextPrompt
from llama_ssp.text.thoughts import ThoughtStream

Conf = TypeVar("Conf", bound=TaskConf)


class Task(Generic[Conf]):
    """Runs a task once, on every rank. Its results can be read at any time, even after an interrupt."""

    is_planned = True  # whether what the run took is compared with a plan

    def __init__(self, inputs: RunInputs, console: Console, folder: RunFolder, ranks: Ranks) -> None:
        self._inputs = inputs
        self._run = inputs.run
        self._task = cast(Conf, inputs.run.task)
        self._console = console
        self._folder = folder
        self._ranks = ranks
        self._skipped = list(inputs.reading.skipped)
        self._pair: PairSession | None = None
        self._plot: str | None = None
        self._results: list[Any] = []  # so far, one for each prompt or check
        self._measured: list[RunMeasurement] = []

    def run(self) -> str:
        """Does the work; returns the status of the summary: done, partial, or failed where a check did."""
        raise NotImplementedError

    def has_output(self) -> bool:
        """Whether there is anything to report, should the run be stopped now."""
        return bool(self._results)

    def figures(self) -> dict[str, Any]:
        """Returns the task's part of the summary."""
        raise NotImplementedError

    def measurements(self) -> list[RunMeasurement]:
        """Returns how fast each way of generating was, for comparison with the plan."""
        return self._measured

    def full_gpu(self, error: Exception) -> DistributedError | None:
        """Returns the error of a full GPU with what is there; None where it is another."""
        return self._pair.full_gpu(error) if self._pair else None

    def _open(self, spec: PairSpec | None = None) -> PairSession:
        """Returns the run's pair, its models not yet loaded."""
        self._pair = PairSession(spec or self._inputs.pairs[0], self._ranks)
        return self._pair

    def _prompts(self, pair: PairSession) -> list[tuple[TextPrompt, Prompt]]:
        """Returns the run's prompts as token ids; bad ones end the run or are skipped, as configured."""
        return pair.prompts(self._inputs.reading.prompts, self._task.on_bad_row, self._skipped)

    def _measurement(self, figures: dict[str, Any], suffix: str = "") -> list[RunMeasurement]:
        """Returns the pair's speed, from the run's figures; the measurement's name ends with `suffix`."""
        if self._pair is None:
            return []
        name = "regular" if self._pair.spec.drafter is None else "speculative"
        return [self._pair.measurement(name + suffix, figures)]

    def _pair_figures(self) -> dict[str, Any]:
        """Returns what the summary says of the pair and of its prompts."""
        skipped = len(self._skipped)
        if self._pair is None:
            return {"rows_skipped": skipped, "devices": {}, "engines": {}, "vocabulary": None}
        return {"rows_skipped": skipped, **self._pair.figures()}

    def _print(self, items: Iterable[Item]) -> None:
        """Prints tables and lines for people, but not with output=json."""
        if self._run.output is Output.text:
            self._console.show(items)

    def _draw(self, name: str | None) -> None:
        """Makes the leader draw the run's picture in the file `name`; if it is None, in the run folder."""
        if self._ranks.is_leader:
            summary = self._folder.summary("", {**self.figures(), "gpus": [gpu.name for gpu in gpus_here()]})
            self._plot = plot(summary, name, self._folder.path)


class ReplyScreen:
    """Prints a text as it comes. Thoughts are dim, or left out; a terminal then says that there are some."""

    def __init__(self, console: Console, thoughts: ThoughtStream, shows_thoughts: bool) -> None:
        self._console = console
        self._thoughts = thoughts
        self._shows_thoughts = shows_thoughts
        self._has_said = False  # that the model thinks

    def write(self, piece: str, has_ended: bool = False) -> None:
        """Prints the next piece; one that may be the beginning of a mark is held back until the next."""
        for part in self._thoughts.take(piece, has_ended):
            if self._shows_thoughts or not part.is_thought:
                self._console.write(part.text, is_dim=part.is_thought)
            elif self._console.is_terminal and not self._has_said:
                self._console.write("thinking ...\n", is_dim=True)
                self._has_said = True

    def end(self) -> None:
        """Prints what was held back, and ends the line."""
        self.write("", has_ended=True)
        self._console.write("\n")


def memory_of_ranks(held: int, device: torch.device, ranks: Ranks) -> list[Bytes]:
    """Returns the most that each rank has held; `held` are its weights and caches. All ranks call it."""
    here: Bytes = {HELD_BYTES: held, TENSORS: None, RESERVED: None, DEVICE: process_bytes()}
    if device.type == "cuda":  # on a CPU torch does not count what tensors take
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)  # other processes' memory, too
        reserved = torch.cuda.max_memory_reserved(device)
        here[TENSORS] = torch.cuda.max_memory_allocated(device)
        here[RESERVED] = reserved
        here[DEVICE] = outside + reserved

    memory = list[Bytes]()
    for sizes in ranks.gather_ints([here[name] or 0 for name in COUNTED]):
        memory.append({name: size or None for name, size in zip(COUNTED, sizes, strict=True)})
    return memory


def output_of(text: str, token_ids: list[int], finish: str | None, prompt_tokens: int) -> dict[str, Any]:
    """Returns a text under the names of the JSON interface."""
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finish,
        "prompt_tokens": prompt_tokens,
        "output_tokens": len(token_ids),
    }


def pace_in_words(figures: dict[str, Any]) -> str:
    """Returns a run's figures as one line for people."""
    words = [f"{figures['tokens_committed']} tokens"]
    if figures["ms_per_token"] is not None:
        words.append(f"{figures['ms_per_token']:.2f} ms/token")
    if figures["acceptance_rate"] is not None:
        words.append(f"{figures['tokens_per_target_forward']:.2f} tokens a round")
        words.append(f"{figures['acceptance_rate']:.0%} accepted")
    return ", ".join(words)


def longest(prompts: Iterable[Prompt]) -> int:
    """Returns the number of tokens of the longest prompt."""
    return max(len(prompt.token_ids) for prompt in prompts)
