"""What a script gives a pair in place of files and names: loaded models, a tokenizer, a drafter."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llama_ssp.config import Dtype, ModelConf, RunConf
from llama_ssp.errors import ModelError, UsageError
from llama_ssp.models.given import GivenModel, given_model, is_module
from llama_ssp.planner.workload import DRAFT, TARGET
from llama_ssp.speculative.drafters.own import MakeDrafter
from llama_ssp.text.tokenizer import HubTokens, IdsAlone, Tokens
from llama_ssp.text.vocabulary import end_ids_of

OWN = "own"  # of `tokenizer`: that of the model's files
# Models of a configuration, by role, until those of the script take their places.
PLACEHOLDERS = {TARGET: "tiny", DRAFT: "tiny_draft"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What a script gives; nothing, by default.

    `tokenizer` is OWN, None for none, a folder, or an object of transformers.
    """

    models: Mapping[str, GivenModel] = field(default_factory=dict)  # by role
    tokenizer: Any = OWN
    make_drafter: MakeDrafter | None = None

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer, so that two vocabularies can be compared."""
        is_own = isinstance(self.tokenizer, str) and self.tokenizer == OWN
        return self.tokenizer is not None and not (is_own and TARGET in self.models)

    def tokens(self, path: Path | None, vocab: int) -> Tokens | None:
        """Returns the target's tokens, where the script decides them; `path` is that of its files."""
        if not self.has_tokenizer:
            ends = self.models[TARGET].ends if TARGET in self.models else frozenset[int]()
            return IdsAlone(vocab, end_ids_of(path) if path is not None else ends)
        if isinstance(self.tokenizer, Path) or (isinstance(self.tokenizer, str) and self.tokenizer != OWN):
            return HubTokens(Path(self.tokenizer))
        if isinstance(self.tokenizer, str):
            return None
        if not hasattr(self.tokenizer, "get_vocab"):
            raise UsageError(
                "tokenizer is no tokenizer of transformers",
                found=type(self.tokenizer).__name__,
                allowed="what AutoTokenizer.from_pretrained returns, a folder, or None",
                fix="give one of these",
            )
        tokens = HubTokens(Path(type(self.tokenizer).__name__), self.tokenizer)
        if TARGET in self.models and self.models[TARGET].ends:
            tokens.end_ids = self.models[TARGET].ends
        return tokens

    def over(self, run: RunConf) -> RunConf:
        """Returns the run with the given models, where they are and in their number formats."""
        devices: dict[str, Any] = {}
        for role, given in self.models.items():
            key = "target_device" if role == TARGET else "draft_device"
            asked = getattr(run.placement, key)
            if asked not in ("auto", str(given.device)):
                raise UsageError(
                    "a loaded model stays where it is",
                    where=f"placement.{key}",
                    found=asked,
                    allowed=str(given.device),
                    fix="move it before, or leave the key out",
                )
            devices[key] = str(given.device)
        placement = replace(run.placement, **devices)
        model = _shaped(run.model, self.models.get(TARGET))
        draft = None if run.draft is None else _shaped(run.draft, self.models.get(DRAFT))
        return replace(run, model=model, draft=draft, placement=placement)


NOTHING = Given()


def _shaped(named: ModelConf, given: GivenModel | None) -> ModelConf:
    """Returns the given model in place of the named one, in the number format that is asked for, if any."""
    if given is None:
        return named
    return given.conf if named.dtype is Dtype.auto else replace(given.conf, dtype=named.dtype)


def taken_apart(model: Any, draft: Any, world: int) -> tuple[dict[str, GivenModel], dict[str, Any]]:
    """Returns the models that are loaded, and the names of all, by role. Raises UsageError or ModelError."""
    loaded = dict[str, GivenModel]()
    names = {TARGET: model, DRAFT: draft}
    for role in (TARGET, DRAFT):
        if not is_module(names[role]):
            continue
        if world > 1:
            raise ModelError(
                "a loaded model runs in one process",
                where=role,
                found=f"{world} ranks",
                allowed="a name or a folder, of which each rank reads its slices",
                fix="save it with save_pretrained, and give the folder",
            )
        loaded[role] = given_model(names[role], "model" if role == TARGET else role)
        names[role] = PLACEHOLDERS[role]
    return loaded, names
