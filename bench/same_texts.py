"""Compares the texts of a commit with those of this checkout, token by token, in fp32 on CPUs.

    python bench/same_texts.py base=COMMIT                  # all cases, eager and compiled
    python bench/same_texts.py base=COMMIT only=block,batch engines=eager
    python bench/same_texts.py base=COMMIT without=head     # a case, or a setting, that one side lacks
    python bench/same_texts.py base=COMMIT sweep=false      # a process for each seed, without -m
    python bench/same_texts.py base=COMMIT control=true     # one seed is changed: must say "different"

Both sides get the same command lines, with every setting written out, and run at the same time with a thread
a process. The comparison stops at the first difference that is no tie (first_difference.py). A chat gives no
token ids: its characters are compared. Some cases need models that are not shipped: they are saved once, for
both sides, as small random models of transformers (`MADE`), or as the shipped draft with a shorter context.

The last line is the verdict, and names what was left out. The exit code is 0 (equal), 1 (different, or a run
failed) or 2 (usage).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.first_difference import Key, Text, first_difference  # noqa: E402
from bench.surroundings import report  # noqa: E402
from bench.words import Words  # noqa: E402
from llama_ssp.report.tables import aligned  # noqa: E402

log = logging.getLogger("bench")
PATIENCE_S, KEPT_S = 900, 7 * 24 * 3600
PROGRAMS = Path(tempfile.gettempdir(), f"same_texts_{os.getuid()}")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SETTINGS = """
    model=demo model.dtype=fp32 draft=demo_draft draft.dtype=fp32
    speculation.drafter=model speculation.verification=block speculation.k=4 speculation.adaptive=false
    speculation.bridge=auto speculation.overlap=off speculation.draft_top=null
    sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0 sampling.min_new_tokens=0
    sampling.repetition_penalty=1 sampling.frequency_penalty=0 sampling.presence_penalty=0
    placement.splitting=tensor placement.draft=leader placement.target_device=cpu placement.draft_device=cpu
    output=json out=null download=false max_new_tokens=40 prefill_chunk=16 stop=[]
"""
BY_TASK = {
    "generate": "batch_size=4 on_bad_row=fail ignore_eos=false chat=false special_tokens=false",
    "batch": "batch_size=4 on_bad_row=fail ignore_eos=false chat=false shard_size=256",
    "chat": "context=512",
}
GREEDY = "sampling.temperature=0"
NGRAMS = "draft=none speculation.drafter=ngram speculation.ngram_min=1 speculation.ngram_max=4"
DRAFT_RANK = "placement.draft=own placement.draft_degree=1 placement.on_draft_loss=stop ignore_eos=true"
# Prompts of 6, 6, 35, 3 and 8 tokens: two lengths are equal, and one is read in three chunks.
LONG = "def first(x):\n    return x[0]\n\n\ndef second(x):\n    return x[1]\n\n\ndef third(x):\n"
PROMPTS = ["def read(path):", "for item in items:", LONG, "import os", "def add(a, b):"]
TEXTS = {"generate": 4, "batch": 30, "chat": 3}  # of a run
TALK = "How do I read a file?\nAnd write one?\nThank you.\n"
MODELS = "MODELS"  # in settings: the folder of made models
# The family of tests/families.py, and what is made otherwise. Each has a draft, a noisy copy of it.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    # Scores are divided by another number than the root of the head's width.
    "gemma": ("gemma2", {"query_pre_attn_scalar": 24}),
    # Experts outweigh attention, and most of what their first layers give is beyond the limit.
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 0.5, "mild": True, "initializer_range": 0.05}),
    # Of two ranks the first holds two of three KV heads, 192 of 320 columns, and 2049 of 4097 tokens.
    "uneven": (
        "llama-gqa", {
            "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 320,
            "vocab_size": 4097,
        },
    ),
}  # fmt: skip
NOISE = 0.02  # of the draft's weights: it agrees sometimes
SHIPPED = ROOT / "llama_ssp" / "shipped"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SHORT = 16  # tokens of context: LONG does not fit into it, and the other texts outgrow it


def made_pair(name: str) -> str:
    """Returns the settings of a pair of made models."""
    return f"model={MODELS}/{name} draft={MODELS}/{name}_draft"


@dataclass(frozen=True)
class Case:
    """A command: the settings that are not the usual ones, and how it is run. Its seeds are 1 to `seeds`."""

    name: str
    settings: str = ""
    seeds: int = 1
    ranks: int = 1
    task: str = "generate"

    def words(self, engine: str, without: Sequence[str] = ()) -> list[str]:
        """Returns the command line, without seed and files."""
        pairs = f"task={self.task} {SETTINGS} {BY_TASK[self.task]} {self.settings} engine={engine}".split()
        settings = dict(pair.split("=", 1) for pair in pairs)
        if settings["draft"] == "none":
            settings.pop("draft.dtype")
        words = [f"{key}={value}" for key, value in settings.items() if key not in without]
        return words + [f"prompt={text}" for text in PROMPTS[: TEXTS["generate"]] if self.task == "generate"]


CASES = [
    Case("block", seeds=20),
    Case("token", "speculation.verification=token", seeds=20),
    Case("likeliest", "speculation.draft_top=16", seeds=3),
    Case("greedy", GREEDY),
    Case("ngram", NGRAMS, seeds=3),
    Case("ngram-greedy", f"{NGRAMS} {GREEDY}"),
    Case("head", "draft=demo_head", seeds=3),
    Case("head-greedy", f"draft=demo_head {GREEDY}"),
    Case("own", DRAFT_RANK, ranks=2),
    Case("own-likeliest", f"{DRAFT_RANK} speculation.draft_top=16", ranks=2),
    Case("own-greedy", f"{DRAFT_RANK} {GREEDY}", ranks=2),
    Case("ranks", "ignore_eos=true", ranks=2),
    Case("batch", task="batch"),
    Case("chat", task="chat"),
    Case("logprobs", "logprobs=20 logprobs_of=target echo=true ignore_eos=true"),
    Case("gemma", made_pair("gemma")),
    Case("gpt-oss", made_pair("gpt_oss")),
    Case("short-draft", f"draft={MODELS}/short_draft"),
    Case("uneven", f"{made_pair('uneven')} ignore_eos=true", ranks=2),
]


@dataclass
class Asked(Words):
    """The command line."""

    base: str = ""
    only: str = ""
    without: str = ""
    engines: str = "eager,compiled"
    sweep: bool = True
    control: bool = False
    write: str = ""


class Failed(Exception):
    """A run that gave no texts."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A tree of the package, and how its command is run."""

    name: str
    tree: Path
    programs: Path
    models: Path  # the folder that MODELS stands for
    without: Sequence[str]
    sweeps: bool

    def python(self, words: Sequence[str], typed: str = "") -> str:
        """Returns what Python prints. Raises Failed with the last line of its log."""
        paths = {"PYTHONPATH": str(self.tree), "TORCHINDUCTOR_CACHE_DIR": str(self.programs)}
        env = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=self.tree, env=env, input=typed, capture_output=True, text=True,
                timeout=PATIENCE_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name}: no end after {PATIENCE_S} s") from None
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        if done.returncode:
            errors = [line for line in lines if line.startswith("error: ")]  # torchrun writes more after it
            raise Failed(f"{self.name}: {(errors or lines)[-1]}")
        if "engine=compiled" in words:  # what does not compile runs eagerly, which would show nothing here
            for line in lines:
                if "runs eagerly" in line:
                    raise Failed(f"{self.name}: {line}")
        return done.stdout

    def check_package(self) -> None:
        """Raises Failed unless this tree's package is imported, not an installed one."""
        file = self.python(["-c", "import llama_ssp; print(llama_ssp.__file__)"]).strip()
        if not Path(file).resolve().is_relative_to(self.tree.resolve()):
            raise Failed(f"{self.name}: the package of another tree is imported")

    def documents(self, case: Case, words: Sequence[str], typed: str = "") -> list[dict[str, Any]]:
        """Returns the document of each run that the command makes."""
        launcher = [*TORCHRUN, str(case.ranks)] if case.ranks > 1 else []
        printed = self.python([*launcher, str(self.tree / "launch" / "run.py"), *words], typed)
        return [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]

    def texts(self, case: Case, engine: str, seeds: Mapping[int, int], *more: str) -> dict[Key, Text]:
        """Returns the texts by seed and id; `seeds` maps the seed in a text's name to the one that is run."""
        words = [word.replace(MODELS, str(self.models)) for word in case.words(engine, self.without)]
        words, runs = [*words, *more], list(seeds.values())
        if self.sweeps and len(runs) > 1 and case.task == "generate" and case.ranks == 1:
            documents = self.documents(case, ["-m", *words, f"seed={','.join(map(str, runs))}"])
        else:
            documents = [document for seed in runs for document in self.single(case, words, seed)]
        if [document["seed"] for document in documents] != runs:
            raise Failed(f"{self.name}: {len(documents)} documents, or of other seeds than {runs}")
        texts = {}
        for seed, document in zip(seeds, documents, strict=True):
            if len(document["outputs"]) != TEXTS[case.task]:
                raise Failed(f"{self.name}: {len(document['outputs'])} texts, not {TEXTS[case.task]}")
            for output in document["outputs"]:
                if "token_ids" not in output:
                    raise Failed(f"{self.name}: text {output['id']}: {output.get('error')}")
                is_greedy = output.get("temperature", 1) == 0 or GREEDY in words
                scores = [*output.get("prompt_logprobs", []), *output.get("logprobs", [])]
                texts[seed, output["id"]] = Text(output["token_ids"], is_greedy, scores)
        return texts

    def single(self, case: Case, words: Sequence[str], seed: int) -> list[dict[str, Any]]:
        """Returns the document of one run; answers of a batch and replies of a chat are its outputs, too."""
        words = [*words, f"seed={seed}"]
        if case.task == "generate":
            return self.documents(case, words)
        if case.task == "chat":
            documents = self.documents(case, words, TALK)
            for document in documents:
                replies = enumerate(document["replies"], start=1)
                document["outputs"] = [{"id": f"reply {n}", "token_ids": list(r["text"])} for n, r in replies]
            return documents
        with tempfile.TemporaryDirectory() as scratch:
            given, answers = Path(scratch, "records.jsonl"), Path(scratch, "answers.jsonl")
            by_id = {record["id"]: record for record in records(seed)}
            given.write_text("".join(f"{json.dumps(record)}\n" for record in by_id.values()), "utf-8")
            documents = self.documents(case, [*words, f"input={given}", f"task.output={answers}"])
            lines = [json.loads(line) for line in answers.read_text("utf-8").splitlines()]
        return [{**document, "outputs": [by_id[x["id"]] | x for x in lines]} for document in documents]


def records(seed: int) -> list[dict[str, Any]]:
    """Returns the records of the batch: some have a seed, a temperature or filters that differ."""
    result: list[dict[str, Any]] = []
    for number in range(TEXTS["batch"]):
        record: dict[str, Any] = {"id": f"record {number}", "prompt": PROMPTS[number % len(PROMPTS)]}
        record["max_new_tokens"] = 8 + number * 11 % 37
        record |= {"seed": seed + 100 + number} if number % 3 == 0 else {}
        record |= {"temperature": 0} if number % 4 == 1 else {}
        record |= {"temperature": 0.8, "top_p": 0.95, "top_k": 50} if number % 4 == 2 else {}
        record |= {"repetition_penalty": 1.1, "min_p": 0.02} if number % 7 == 3 else {}
        result.append(record)
    return result


def compared(
    sides: Sequence[Side], case: Case, engine: str, ties: list[str], is_control: bool
) -> tuple[str, list[str]]:
    """Runs a case on both sides; returns the first difference, or nothing, and a row for the table."""

    def both(seed: int, steps: Sequence[int], *more: str) -> list[dict[Key, Text]]:
        """Returns each side's texts; in the control today's last seed is the next one."""

        def texts(side: Side) -> dict[Key, Text]:
            moved = int(is_control and side.name == "today")
            changed = {seed + step: seed + step + moved * (seed + step >= case.seeds) for step in steps}
            return side.texts(case, engine, changed, *more)

        with ThreadPoolExecutor(len(sides)) as pool:
            return list(pool.map(texts, sides))

    def rewrite(key: Key, steps: Sequence[int], scored: bool) -> list[tuple[Text, Text]]:
        seed, name = key
        old, new = both(seed, steps, *["logprobs=20"] * (scored and case.task != "chat"))
        missing = Text(["no text"])
        return [(old.get((seed + n, name), missing), new.get((seed + n, name), missing)) for n in steps]

    began = time.monotonic()
    base, today = both(1, range(case.seeds))
    said = first_difference(f"{case.name} {engine}", base, today, rewrite, ties)
    tokens, spent = sum(len(text.tokens) for text in base.values()), time.monotonic() - began
    log.info("%s %s: %d texts, %d tokens, %.0f s", case.name, engine, len(base), tokens, spent)
    return said, [case.name, engine, str(len(base)), str(tokens), f"{spent:.0f}"]


def program_folder(tree: Path) -> Path:
    """Returns the folder for compiled programs of exactly these sources; removes folders of a week ago.

    The package names a program by the files that it is made from. If its list lacked one, a program of older
    sources would run and hide a fault. So other sources have another folder.
    """
    digest = hashlib.sha256()
    for file in sorted(tree.glob("llama_ssp/**/*")):
        if file.suffix in (".py", ".cpp"):
            digest.update(f"{file.relative_to(tree)}\0".encode() + file.read_bytes() + b"\0")
    for folder in PROGRAMS.glob("*"):
        if folder.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
    kept = PROGRAMS / digest.hexdigest()[:16]
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(kept)
    return kept


@contextmanager
def made_models(cases: Sequence[Case]) -> Iterator[Path]:
    """Saves the models that the cases need and that are not shipped; removes them at the end."""
    settings = " ".join(case.settings for case in cases)
    with tempfile.TemporaryDirectory() as home:
        for name in MADE:
            if made_pair(name) in settings:
                save_pair(name, Path(home))
        if "short_draft" in settings:
            save_short_draft(Path(home, "short_draft"))
        yield Path(home)


def save_pair(name: str, home: Path) -> None:
    """Saves a target of `MADE` and its draft, with the shipped tokenizer."""
    from tests.families import build  # here, as most cases need neither torch nor transformers
    from tests.rig import perturbed

    family, changes = MADE[name]
    sizes = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, **changes}
    for folder, noise in ((home / name, 0.0), (home / f"{name}_draft", NOISE)):
        perturbed(build(family, **sizes), noise).save_pretrained(folder)
        for file in TOKENIZER:
            shutil.copy(SHIPPED / "demo" / file, folder)


def save_short_draft(folder: Path) -> None:
    """Saves the shipped draft as a model whose context is shorter than a prompt."""
    shutil.copytree(SHIPPED / "demo_draft", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**config, "max_position_embeddings": SHORT}), "utf-8")


def git(*words: str) -> str:
    """Returns what git prints. Raises CalledProcessError."""
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Makes a worktree of the commit, and removes it at the end."""
    with tempfile.TemporaryDirectory() as home:
        git("worktree", "add", "--detach", f"{home}/base", commit)
        try:
            yield Path(home, "base")
        finally:
            git("worktree", "remove", "--force", f"{home}/base")


def checked(options: Asked) -> tuple[str, list[Case]]:
    """Returns the base's commit, and the cases that are run. Raises ValueError for what is not known."""
    names = [case.name for case in CASES]
    keys = [word.partition("=")[0] for case in CASES for word in case.words("eager")]
    for key, known in (("only", names), ("without", [*names, *keys]), ("engines", ["eager", "compiled"])):
        if unknown := [word for word in getattr(options, key).split(",") if word and word not in known]:
            raise ValueError(f"unknown: {key}={','.join(unknown)}; known: {', '.join(dict.fromkeys(known))}")
    without, only = options.without.split(","), options.only.split(",") if options.only else names
    cases = [case for case in CASES if case.name in only and case.name not in without]
    if not cases or not options.engines:
        raise ValueError("no case is left")
    try:
        return git("rev-parse", "--verify", f"{options.base or 'none'}^{{commit}}"), cases
    except subprocess.CalledProcessError:
        raise ValueError(f"base={options.base} is no commit") from None


def main() -> int:
    """Runs the cases; returns the exit code."""
    try:
        options = Asked.of(sys.argv[1:])
        commit, cases = checked(options)
    except (SystemExit, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    # Before transformers is imported, which says much of small models.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    began, verdict, ties = time.monotonic(), "", list[str]()
    rows, texts, without = [["case", "engine", "texts", "tokens", "s"]], 0, options.without.split(",")
    with worktree(commit) as folder, made_models(cases) as models:
        sides = [
            Side(
                name=name, tree=tree, programs=program_folder(tree), models=models, without=without,
                sweeps=options.sweep,
            )
            for name, tree in (("base", folder), ("today", ROOT))
        ]  # fmt: skip
        at = "the package"
        try:
            for side in sides:
                side.check_package()
            for engine, case in product(options.engines.split(","), cases):
                at = f"{case.name} {engine}"
                said, row = compared(sides, case, engine, ties, options.control and case is cases[0])
                rows.append(row)
                texts += int(row[2])
                if said:
                    verdict = f"different: {said}"
                    break
        except Failed as error:
            verdict = f"error: {at}: {error}"
    left_out = [case.name for case in CASES if case not in cases]
    left_out += [word for word in without if word and word not in left_out]
    equal = f"equal: {texts} texts of {len(cases)} cases, {options.engines}, ties: {len(ties)}"
    spent = time.monotonic() - began
    about = f"base {commit[:7]}, {spent:.0f} s, left out: {', '.join(left_out) or 'nothing'}"
    table = ["```", *aligned(rows, 2), "```", "", *(f"Tie: {tie}" for tie in ties)]
    report(
        options.write, "Texts before and after", {"both sides": "cpu, fp32, a thread a process"},
        f"Compared with commit {commit[:7]}.", "", *table, f"{verdict or equal}; {about}",
    )  # fmt: skip
    return int(bool(verdict))


if __name__ == "__main__":
    sys.exit(main())
