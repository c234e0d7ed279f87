"""The sampling that a model comes with: a temperature and filters that its makers recommend. No torch.

Of a folder it is in generation_config.json, of a GGUF file in the header, and a preset may have one for files
that say nothing. Penalties of single tokens, biases and lengths are the user's alone.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from llama_ssp.config import MAX_TEMPERATURE, MIN_TEMPERATURE, ModelConf, SamplingConfig, Weights
from llama_ssp.errors import ModelError
from llama_ssp.models.folder import is_gguf, read_json

GENERATION = "generation_config.json"
# The controls that are read, and llama.cpp's keys of a GGUF header for them.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
GREEDY = SamplingConfig(temperature=0.0)
Range = tuple[float, float, bool]  # the third: the lower end is left out
RULES: dict[str, Range] = {entry.name: entry.metadata["range"] for entry in fields(SamplingConfig)}


@dataclass(frozen=True)
class OwnSampling:
    """What a model recommends, and where it says so; nothing, if it does not."""

    usual: SamplingConfig = field(default_factory=SamplingConfig)
    source: str = ""

    @property
    def in_words(self) -> str:
        """Returns what a user should know of it; empty if nothing is recommended."""
        if not self.source:
            return ""
        if self.usual.temperature == 0:
            return f"sampling: greedy, as {self.source} says; sampling=plain samples at temperature 1"
        values = ", ".join(f"{name} {value:g}" for name, value in self.usual.named.items())
        return f"sampling: {values}, as {self.source} says; sampling=plain is the whole distribution"


def left_open(sampling: SamplingConfig, model: ModelConf, path: Path | None) -> OwnSampling:
    """Returns what the model recommends of the controls that are null; its files are read if any is."""
    open_names = [name for name in GGUF_KEYS if getattr(sampling, name) is None]
    if not open_names:
        return OwnSampling()
    own = own_sampling(model, path)
    taken = {name: value for name, value in own.usual.named.items() if name in open_names}
    return OwnSampling(replace(SamplingConfig(), **taken), own.source if taken else "")


def own_sampling(model: ModelConf, path: Path | None) -> OwnSampling:
    """Returns the sampling of a model's files, else of its preset. Raises ModelError if it cannot be."""
    if path is not None:
        found = _in_header(path) if is_gguf(path) else _in_folder(path)
        if found.source:
            return found
    if model.sampling:
        source = "its generation_config" if model.weights is Weights.loaded else "its preset"
        usual = _checked(model.sampling, f"{source}, {model.name}")
        return OwnSampling(usual, source if usual.named else "")
    return OwnSampling()


def _in_folder(path: Path) -> OwnSampling:
    file = path / GENERATION
    if not file.exists():
        return OwnSampling()
    content = read_json(file)
    if content.get("do_sample") is False:  # then transformers reads none of the others
        return OwnSampling(GREEDY, GENERATION)
    usual = _checked(content, str(file))
    return OwnSampling(usual, GENERATION if usual.named else "")


def _in_header(path: Path) -> OwnSampling:
    from llama_ssp.models.formats.gguf_header import read_header  # imports gguf

    metadata = read_header(path).metadata
    values = dict[str, Any]()
    for name, key in GGUF_KEYS.items():
        value = metadata.get(key)
        # Its numbers have 32 bits: 0.95 would be 0.949999988079071.
        values[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    usual = _checked(values, str(path))
    return OwnSampling(usual, "its GGUF header" if usual.named else "")


def _checked(values: dict[str, Any], where: str) -> SamplingConfig:
    """Returns the controls among the values, of which null is none."""
    usual = SamplingConfig()
    for name in GGUF_KEYS:
        value = values.get(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:  # how some say that all tokens are kept
            value = 0
        if not _is_possible(name, value):
            raise ModelError(
                f"the model recommends a {name} that cannot be",
                where=where,
                found=repr(value)[:60],
                allowed=_allowed(name),
                fix="correct it, or write sampling=plain",
            )
        setattr(usual, name, int(value) if name == "top_k" else float(value))
    return usual


def _allowed(name: str) -> str:
    if name == "temperature":
        return f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    low, high, above = RULES[name]
    return f"{'above ' if above else ''}{low:g} to {high:g}"


def _is_possible(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "temperature":
        return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE
    low, high, above = RULES[name]
    if name == "top_k" and value != value // 1:
        return False
    return (low < value if above else low <= value) and value <= high
