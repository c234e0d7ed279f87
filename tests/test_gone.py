"""What 0.2 had is accepted as before, or refused with the new way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.config import RunConf
from llama_ssp.config.arguments import COMMANDS
from llama_ssp.config.compose import run_jobs, to_run
from llama_ssp.config.gone import INSTEAD
from llama_ssp.config.presets import CONF, GROUPS, options
from llama_ssp.config.run import key_types, kinds_of
from llama_ssp.config.tasks import TASKS
from llama_ssp.errors import UsageError

ROOT = Path(__file__).parents[1]
BEFORE: dict[str, Any] = yaml.safe_load((ROOT / "tests/settings_of_0_2.yaml").read_text(encoding="utf-8"))


def lines_of_0_2() -> Iterator[tuple[list[str], bool]]:
    """Yields command lines, each with one thing that 0.2.0 had, and whether it is there today."""
    for group, leaves in BEFORE["keys"].items():
        for leaf in leaves:
            if group.startswith("task="):
                schema = TASKS[group.removeprefix("task=")]
                yield [group, f"task.{leaf}=1"], leaf in key_types(schema)
            else:
                key = leaf if group == "run" else f"{group}.{leaf}"
                yield [f"{key}=1"], key in key_types()

    for key, choices in BEFORE["choices"].items():
        (kind,) = kinds_of(key_types()[key])
        for choice in choices:
            yield [f"{key}={choice}"], choice in list(kind)

    for group, names in BEFORE["presets"].items():
        for name in names:
            yield [f"{group}={name}"], name in options(group) or (CONF / group / f"{name}.yaml").exists()

    for command in BEFORE["commands"]:
        yield [command], command in COMMANDS


GONE = [words for words, is_there in lines_of_0_2() if not is_there]


def refusal(words: list[str]) -> str:
    """Returns why a command line is refused."""
    with pytest.raises(UsageError) as refused:
        run_jobs(words, lambda job: len(str(to_run(job.cfg))))
    return str(refused.value)


def test_the_list_is_that_of_0_2() -> None:
    assert len(list(lines_of_0_2())) > 400 and len(GONE) > 25
    assert BEFORE["presets"].keys() == {*GROUPS}


@pytest.mark.parametrize("words", GONE, ids=" ".join)
def test_what_went_is_refused_with_the_new_way(words: list[str]) -> None:
    said = refusal(words)
    assert " is gone since 0.2; " in said and "did you mean" not in said
    assert said.partition("; ")[2] in INSTEAD.values()


@pytest.mark.parametrize(
    "words",
    [["siblings=2"], ["--siblings", "2"], ["+speculation.siblings=2"], ["verification=coupled"],
     ["generate", "7B", "mtp"], ["draft=tiny", "draft.weights=mtp"], ["eval", "--plot", "x.png"]],
    ids=" ".join,
)  # fmt: skip
def test_other_spellings_are_refused_in_the_same_way(words: list[str]) -> None:
    assert " is gone since 0.2; " in refusal(words)


def test_a_preset_of_the_users_own_may_have_an_old_name(tmp_path: Path) -> None:
    (tmp_path / "speculation").mkdir()
    (tmp_path / "speculation/tree.yaml").write_text("k: 3\n")
    taken = list[RunConf]()

    def keep(job: Any) -> int:
        taken.append(to_run(job.cfg))
        return 0

    assert run_jobs(["speculation=tree", "--config-dir", str(tmp_path)], keep) == 0
    assert taken[0].speculation.k == 3


def test_keys_in_a_preset_of_the_users_own_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as the command does
    (tmp_path / "speculation").mkdir()
    (tmp_path / "speculation/mine.yaml").write_text("siblings: 2\n")
    said = refusal(["speculation=mine", "--config-dir", str(tmp_path)])
    assert said.startswith("speculation.siblings is gone since 0.2; ")


def test_settings_of_the_python_api_are_refused_too() -> None:
    from llama_ssp.config import SpeculationConfig
    from llama_ssp.config.validation import check_values

    spec: Any = SpeculationConfig()
    spec.verification = "coupled"
    with pytest.raises(UsageError, match=r"speculation\.verification=coupled is gone since 0\.2; leave"):
        check_values(spec, "speculation.")


def test_the_new_ways_name_pages_that_are_there() -> None:
    pages = {word.strip("(),:") for text in INSTEAD.values() for word in text.split() if "docs/" in word}
    assert pages and all((ROOT / page).is_file() for page in pages)
