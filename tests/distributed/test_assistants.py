"""An assistant that is split with its target: what it declares, texts, bytes, and where it may be."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from llama_ssp.config import DraftSeat, Dtype, Overlap, PlacementConf, SamplingConfig
from llama_ssp.distributed.comm import ALONE
from llama_ssp.distributed.placement import resolve
from llama_ssp.distributed.roles import Roles
from llama_ssp.errors import DistributedError
from llama_ssp.models.decoder_model import DecoderModel
from llama_ssp.models.heads.load import TargetOfHead, load_head
from llama_ssp.pair.assembly import RankModels
from llama_ssp.planner.memory import rank_work
from llama_ssp.planner.search import require_with_target
from llama_ssp.planner.weights import held
from llama_ssp.planner.workload import DRAFT, TARGET, Role, Workload
from llama_ssp.speculative.drafters.head import AssistantShard, head_drafter
from llama_ssp.speculative.drafters.local import Sampler
from llama_ssp.speculative.engine import Engine, RankEngine
from llama_ssp.speculative.follower import Follower
from llama_ssp.speculative.model_runner import ModelRunner
from llama_ssp.speculative.sampling import SamplingTransform
from llama_ssp.speculative.verification import RULES
from tests import checkpoints
from tests.conftest import Command
from tests.distributed.pairs import Case, OverRanks, engine_of, opened, refilled, written
from tests.distributed.threads import ThreadRank, ranks_of, together
from tests.families import WINDOW, build, decoder_of, greedy_text, ragged_prompts
from tests.heads import save_assistant
from tests.proofs.choices import distance, every_branch
from tests.proofs.scenarios import Plain, Scenario, expected
from tests.proofs.scenarios import written as finished
from tests.rig import steps_of
from tests.test_assistants import Compared

pytestmark = pytest.mark.skipif(
    "gemma4_assistant" not in CONFIG_MAPPING, reason="this transformers has no assistants of Gemma 4"
)
VOCAB = 96
SPLIT = PlacementConf(draft=DraftSeat.sharded)
HEAT = SamplingConfig(temperature=4.0)
CONTROLLED = SamplingConfig(temperature=4.0, top_p=0.95, repetition_penalty=1.1)
PROMPTS = ragged_prompts(9, WINDOW + 7, 1, 4)
# Each rank has a head of keys of the layers with a window, and all have the one of the others; then shares
# of three sizes, of which two ranks have the same head of keys in layers that see the whole text.
HEADS: dict[int, dict[str, int]] = {
    2: {},
    3: {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 1},
}


def saved(folder: Path, world: int, groups: int = 0) -> tuple[tuple[Path, Path], Any, Any]:
    """Returns the folders of a target and its assistant, and transformers' modules of them."""
    module = build("gemma4", vocab_size=VOCAB, **HEADS[world])
    module.save_pretrained(folder / "target")
    heads = module.config.num_attention_heads
    assistant = save_assistant(folder / "assistant", module.config, groups=groups, num_attention_heads=heads)
    return (folder / "target", folder / "assistant"), module, assistant


def compared(pair: RankModels, run: Any, module: Any, assistant: Any) -> int:
    """Writes texts; the leader compares what it declares with transformers'. Returns how often it did."""
    engine: Any = engine_of(pair, run, Case(3, 4, HEAT))
    watched = Compared(module, assistant, engine) if pair.roles.leads else None
    steps_of(engine, list(PROMPTS), 8, 3)
    return watched.count if watched else 0


@pytest.mark.parametrize("world", HEADS)
@torch.inference_mode()
def test_declared_distributions_are_those_of_transformers(world: int, tmp_path: Path) -> None:
    """Of ragged rows, after rejections, of texts shorter and longer than the window."""
    folders, module, assistant = saved(tmp_path, world, groups=12 if world == 3 else 0)
    pairs = OverRanks(*folders, SPLIT, world)
    counts = pairs.run(partial(compared, module=module, assistant=assistant))
    assert counts[0] > 20 and not any(counts[1:])


@pytest.mark.parametrize("world", HEADS)
def test_texts_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    """Greedy ones are the target's own; sampled ones with ends, adaptive K, and rows that are refilled."""
    folders, module, _ = saved(tmp_path, world)
    alone = opened(*folders, PlacementConf(), ALONE)
    pairs = OverRanks(*folders, SPLIT, world)
    assert all(pair.head is not None for pair, _ in pairs.held)
    module.generation_config.eos_token_id = None
    for k in (1, 4):
        case = Case(k, 4)
        for run in pairs.run(written, case, PROMPTS):
            for prompt, text in zip(PROMPTS, run.texts, strict=True):
                new = text[-case.max_new :]
                assert new == greedy_text(module, prompt.token_ids, case.max_new), len(prompt.token_ids)
            assert run.drafted > 0

    sampled = Case(3, 4, CONTROLLED, overlap=Overlap.off)
    free = written(*alone, sampled, PROMPTS)
    assert free.drafted > free.accepted > 0
    ended = replace(sampled, ends=frozenset({free.texts[0][-10], free.texts[1][-5]}))
    for case in (ended, replace(sampled, adaptive=True)):
        expected = written(*alone, case, PROMPTS)
        for run in pairs.run(written, case, PROMPTS):
            assert (run.texts, run.finish, run.drafted) == (expected.texts, expected.finish, expected.drafted)
    texts = written(*alone, ended).texts
    assert all(found == texts for found in pairs.run(refilled, ended))


@pytest.mark.parametrize(("world", "groups"), [(2, 0), (3, 12)])
def test_each_rank_holds_the_bytes_that_are_planned(world: int, groups: int, tmp_path: Path) -> None:
    """The first one also what comes before and after the blocks, and states; none has the target's table."""
    folders, _, _ = saved(tmp_path, world, groups)
    pairs = OverRanks(*folders, SPLIT, world)
    case = Case(3, 4, HEAT)
    pairs.run(written, case, PROMPTS)
    work = Workload(rows=4, prompt_tokens=WINDOW + 7, new_tokens=case.max_new, k=3)
    sizes = []
    for rank, (pair, run) in enumerate(pairs.held):
        assert pair.head is not None and run.draft is not None
        roles = Role(TARGET, run.model, Dtype.fp32), Role(DRAFT, run.draft, Dtype.fp32)
        planned = rank_work(*roles, resolve(SPLIT, world, True), work, rank).draft
        assert planned is not None
        assert sum(held(planned.part, Dtype.fp32).values()) == pair.head.weights_bytes
        assert planned.caches_bytes(4) == pair.head.caches.most
        sizes.append(pair.head.weights_bytes)
    whole = opened(*folders, PlacementConf(), ALONE)[0].head
    assert whole is not None and max(sizes) < whole.weights_bytes


def test_where_a_split_assistant_may_be(command: Command, tmp_path: Path) -> None:
    """On all of the target's ranks, whole ones; a plan puts it there, and so do ranks without a plan."""
    for conf in (PlacementConf(), PlacementConf(draft=DraftSeat.own)):
        with pytest.raises(DistributedError, match="split with the target"):
            require_with_target(resolve(conf, 3, drafts=True))
    for conf, world in ((SPLIT, 3), (SPLIT, 1), (PlacementConf(), 1)):
        require_with_target(resolve(conf, world, drafts=True))

    module = build("gemma4", vocab_size=300)
    module.save_pretrained(tmp_path / "target")
    checkpoints.write_tokenizer(tmp_path / "target", checkpoints.tokenizer(300))
    save_assistant(tmp_path / "assistant", module.config)
    pair = f"model={tmp_path / 'target'}", f"draft={tmp_path / 'assistant'}"
    plan = "task=plan", *pair, "cluster=p4d", "ranks=2", "task.prompt_tokens=8", "out=null"
    answer = command(*plan, "placement=leader")
    assert answer.code == 5 and "split with the target" in answer.err
    answer = command(*plan, "output=json")
    assert answer.code == 0, answer.err


class OverTwo:
    """A Gemma 4 and its assistant in fp64, on two ranks that are threads; `walk` follows every branch."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.scenario = scenario
        sizes = {"vocab_size": scenario.vocab, "sliding_window": 2}
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        module = build("gemma4", 0, torch.float64, mild=True, **sizes, **ends)
        save_assistant(folder, module.config, dtype=torch.float64)
        self.whole = DecoderModel(decoder_of(module), module.config, "target")
        self.ranks = ranks_of(2)
        self.parts = []
        for rank in self.ranks:
            target = DecoderModel(decoder_of(module, rank), module.config, "target", rank)
            told = TargetOfHead(config=module.config, look_up=target.look_up)
            where = Dtype.fp64, torch.device("cpu"), 3
            head = load_head(folder, *where, no_table, "head", fast=False, target=told, ranks=rank)
            self.parts.append((target, head))

    def walk(self) -> tuple[float, int]:
        """Returns the total variation from the target's own distribution, and the number of branches."""
        found, branches = every_branch(self._play)
        return distance(found, expected(self.scenario, Plain(self.whole))), branches

    def _play(self, draws: Any) -> Any:
        jobs = [partial(self._on, rank, draws) for rank in self.ranks]
        return together(jobs, self.ranks)[0]

    @torch.inference_mode()
    def _on(self, rank: ThreadRank, draws: Any) -> Any:
        target, head = self.parts[rank.rank]
        runner = ModelRunner(target, 512, self.scenario.k)
        target.tap(head.taps if rank.is_leader else ())
        transform = SamplingTransform(SamplingConfig(), (), self.scenario.vocab)
        sampler = Sampler(transform, draws, torch.float64)
        roles = Roles(everyone=rank, target=rank, draft=rank, drafting=rank)
        engine: RankEngine
        if rank.is_leader:
            drafter = head_drafter(head, runner, sampler)
            engine = Engine(runner, drafter, sampler, RULES[self.scenario.rule], roles)
        else:
            shard = AssistantShard(head, runner)
            engine = Follower(runner, shard, sampler, roles, target.context, target.device)
        return finished(self.scenario, engine)


def no_table(_output: bool) -> Any:
    raise AssertionError("a rank asked for the target's table")


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_distribution_of_texts_is_the_targets(rule: str, tmp_path: Path) -> None:
    """Every branch of the loop that ships, on two ranks, of two ragged rows with ends."""
    plain = Scenario(groups=0, vocab=2, k=2, new=3, rule=rule)
    for number, scenario in enumerate((plain, replace(plain, prompts=((1, 1, 0), (0,)), k=1, new=2))):
        error, branches = OverTwo(tmp_path / str(number), scenario).walk()
        assert error < 1e-12
        assert branches > 8
