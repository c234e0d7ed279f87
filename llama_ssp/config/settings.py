"""The settings of a call of the Python API: keys of the command line, by their names there. No torch.

    Settings(max_new_tokens=64, temperature=0, k=6)          # max_new_tokens=64 temperature=0 k=6
    Settings(sampling={"top_p": 0.9}, stop="\n", seed=1)

A value is a plain one of Python: a number, also of NumPy, a text, a list, a mapping. What is left out, or is
None, is as the pair has it: by the overrides that it was loaded with, else as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from enum import EnumType
from typing import Any, SupportsFloat, SupportsIndex, TypedDict, Unpack, get_args, get_origin

from llama_ssp.config.arguments import SHORT_KEYS
from llama_ssp.config.presets import nearest
from llama_ssp.config.run import RunConf, key_types, kinds_of
from llama_ssp.config.schema import SamplingConfig, SpeculationConfig
from llama_ssp.errors import UsageError

SEED = "seed"
GROUPS = {"sampling": SamplingConfig, "speculation": SpeculationConfig}


class SettingsByName(TypedDict, total=False):
    """The names of settings, with the types of their values; docs/keys.md says what each means."""

    max_new_tokens: SupportsIndex | None
    stop: str | Iterable[str] | None
    ignore_eos: bool | None
    special_tokens: bool | None
    chat: bool | None
    system: str | None
    enable_thinking: bool | None
    template: Mapping[str, Any] | None
    logprobs: SupportsIndex | None
    logprobs_of: str | None
    seed: SupportsIndex | Iterable[SupportsIndex] | None  # of several, each prompt has its own

    sampling: SamplingConfig | Mapping[str, Any] | None
    temperature: SupportsFloat | None
    top_k: SupportsIndex | None
    top_p: SupportsFloat | None
    min_p: SupportsFloat | None
    repetition_penalty: SupportsFloat | None
    frequency_penalty: SupportsFloat | None
    presence_penalty: SupportsFloat | None
    logit_bias: Mapping[int, float] | None
    bad_tokens: Iterable[SupportsIndex] | None
    min_new_tokens: SupportsIndex | None

    speculation: SpeculationConfig | Mapping[str, Any] | None
    k: SupportsIndex | None
    drafter: str | None
    verification: str | None
    adaptive: bool | None
    k_max: SupportsIndex | None
    cost_ratio: SupportsFloat | None
    draft_top: SupportsIndex | None
    ngram_min: SupportsIndex | None
    ngram_max: SupportsIndex | None
    bridge: str | None
    overlap: str | None


NAMES = tuple(SettingsByName.__annotations__)


class Settings:
    """What `generate` and `stream` are asked for; see the module."""

    def __init__(self, **given: Unpack[SettingsByName]) -> None:
        """Raises TypeError for an unknown name, and UsageError for a setting that is given twice."""
        values = dict[str, Any]()
        for name, value in given.items():
            if name not in NAMES:
                raise TypeError(unknown_name(name))
            if value is None:
                continue
            named = _entries(name, value) if name in GROUPS else {_key(name): value}
            if twice := sorted(values.keys() & named.keys()):
                raise UsageError(
                    f"{twice[0]} is given twice", fix=f"leave it out of {name}, or give it there alone"
                )
            values |= named
        self._values = {key: _of_key(key, value) for key, value in values.items()}

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{key}={value!r}' for key, value in self._values.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._values == other._values

    def but(self, **changes: Unpack[SettingsByName]) -> Settings:
        """Returns the settings with these changes."""
        result = Settings(**changes)
        result._values = {**self._values, **result._values}
        return result

    @property
    def seeds(self) -> list[int] | None:
        """The seeds of the prompts, one each; None where there is one for all, or none."""
        seed = self._values.get(SEED)
        return seed if isinstance(seed, list) else None

    def over(self, run: RunConf) -> RunConf:
        """Returns the run with these settings; what they leave open is the run's."""
        of_groups: dict[str, dict[str, Any]] = {"task": {}, "sampling": {}, "speculation": {}}
        for key, value in self._values.items():
            group, _, leaf = key.partition(".")
            if key != SEED:
                of_groups[group][leaf] = value
        seed = run.seed if self.seeds is not None else self._values.get(SEED, run.seed)
        return replace(
            run,
            task=replace(run.task, **of_groups["task"]),
            sampling=replace(run.sampling, **of_groups["sampling"]),
            speculation=replace(run.speculation, **of_groups["speculation"]),
            seed=seed,
        )


def unknown_name(name: str, others: Iterable[str] = ()) -> str:
    """Returns what is wrong with a name that no setting has, and the nearest one of these and `others`."""
    near = nearest(name, [*NAMES, *others])
    meant = f"; did you mean {near}?" if near else "; docs/keys.md has the names"
    if name in SHORT_KEYS:
        meant = f": {SHORT_KEYS[name]} is of the command line alone"
    return f"there is no setting {name}{meant}"


def _key(name: str) -> str:
    """Returns the dotted key of a name; a seed has no group."""
    return SHORT_KEYS.get(name, name)


def _entries(group: str, given: Any) -> dict[str, Any]:
    """Returns what a group's settings say, by key. Raises TypeError for an unknown name."""
    kind = GROUPS[group]
    names = [entry.name for entry in fields(kind)]
    if isinstance(given, SamplingConfig) and kind is SamplingConfig:
        named: Mapping[str, Any] = given.named
    elif isinstance(given, kind):
        # All of it counts; a K that it leaves open is the pair's.
        named = {name: value for name, value in vars(given).items() if (name, value) != ("k", None)}
    elif isinstance(given, Mapping):
        named = {name: value for name, value in given.items() if value is not None}
    else:
        raise UsageError(
            f"{group} is of the wrong type",
            found=type(given).__name__,
            allowed=f"{kind.__name__}, or a mapping of its names",
            fix=f"write {group}={{{names[0]!r}: ...}}",
        )
    for name in named:
        if name not in names:
            near = nearest(str(name), names)
            raise TypeError(f"{group} has no {name}" + (f"; did you mean {near}?" if near else ""))
    return {f"{group}.{name}": value for name, value in named.items()}


def _of_key(key: str, value: Any) -> Any:
    """Returns a plain value as the key's type has it; one that has no such form is returned as it is.

    What is returned so, `validation.check` refuses.
    """
    if key == SEED and getattr(value, "shape", None) != () and _is_listing(value):
        return [_plain(int, item) for item in value]
    return _plain(key_types()[key], value)


def _plain(hint: Any, value: Any) -> Any:
    """Returns the value in the form of this type, if it has one."""
    if getattr(value, "shape", None) == ():  # one number of NumPy or torch
        value = value.item()
    for kind in kinds_of(hint):
        if isinstance(kind, EnumType) and isinstance(value, str) and value in list(kind):
            return kind(value)
        origin = get_origin(kind)
        inside = get_args(kind)
        if origin is list and (_is_listing(value) or (inside == (str,) and isinstance(value, str))):
            return [_plain(inside[0], item) for item in ([value] if isinstance(value, str) else value)]
        if origin is dict and isinstance(value, Mapping):
            return {_plain(inside[0], name): _plain(inside[1], item) for name, item in value.items()}
    return value


def _is_listing(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
