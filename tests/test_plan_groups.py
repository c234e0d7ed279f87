"""A job over many nodes, planned: which groups, how fast, at what price, and what limits them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from llama_ssp.batch.manifest import shards_of
from llama_ssp.planner.groups import PROMPTS, JobSize, job_s, plan_job
from llama_ssp.planner.plan import target_prefill_s
from llama_ssp.planner.search import search
from llama_ssp.planner.speed import CACHES, READING
from tests.plans import machine, request

P4D = machine("p4d")
MANY = JobSize(1_000_000, 256)


def small(**work: int):
    return request("13B", None, P4D, **{"rows": 8, **work})


@pytest.mark.parametrize(("records", "shard"), [(1, 4), (4, 4), (5, 4), (1000, 256), (999, 1)])
def test_shards_are_those_of_the_job(records: int, shard: int):
    size, shards = JobSize(records, shard), shards_of(records, shard)
    assert (size.shards, size.largest) == (len(shards), max(one.count for one in shards))


def test_a_group_takes_one_shard_after_the_other():
    assert [job_s(6, 2.0, groups) for groups in (1, 2, 4, 6, 9)] == [12, 6, 4, 2, 2]


def test_where_the_time_of_a_record_goes():
    """Its parts add up to what the placement's times say; a long text reads more of the caches."""
    on = request("65B", "7B", P4D, rows=4)
    group = plan_job(on, MANY, [1], None).groups[-1]
    assert group.gpus == 8 and not group.option.placement.draft_apart
    prompts = group.spent[PROMPTS]
    assert prompts > target_prefill_s(on, group.option.placement, 1)  # the draft reads it, too
    assert group.record_s - prompts == pytest.approx(group.option.ms_per_token / 1000 * on.work.new_tokens)
    assert group.shares()[0][0] == READING and sum(share for _, share in group.shares()) == pytest.approx(1)
    long, short = (
        dict(plan_job(small(prompt_tokens=n), MANY, [1], None).groups[0].shares()) for n in (1900, 60)
    )
    assert long[CACHES] > 2 * short[CACHES]


def test_the_last_rows_of_a_shard_take_as_long():
    group = plan_job(small(), MANY, [1], None).groups[0]
    assert group.shard_s(9, 8) == group.shard_s(16, 8) == 16 * group.record_s


def test_more_groups_beat_wider_ones_until_there_are_too_few_shards():
    on = small()
    many, few = (plan_job(on, JobSize(256 * shards, 256), [1, 4, 16], 3.0) for shards in (10_000, 32))
    assert [one.group.gpus for one in many.nodes] == [1, 1, 1]
    assert [one.groups for one in many.nodes] == [8, 32, 128]
    assert [one.group.gpus for one in few.nodes] == [1, 1, 4]  # 128 GPUs, 32 shards
    assert few.nodes[-1].groups == 32 and list(few.sentences()) == [
        "1-4 nodes: groups of 1 GPU end first", "16 nodes: groups of 4 GPUs end first",
    ]  # fmt: skip
    assert many.nodes[-1].job_s == pytest.approx(many.nodes[0].job_s / 16, rel=0.02)
    alone = plan_job(on, JobSize(256, 256), [64], None).nodes[0]
    assert alone.group.gpus == 8 and alone.limit == "only 1 shard" and alone.price is None


def test_prices_are_of_all_gpus_for_the_whole_time():
    (one,) = plan_job(small(new_tokens=100), MANY, [2], 3.0).nodes
    found = one.document()
    assert one.price == pytest.approx(16 * 3.0 * one.job_s / 3600)
    assert found["price_per_million_tokens"] == pytest.approx(one.price / 100)
    assert found["tokens_per_s"] == pytest.approx(100 * MANY.records / one.job_s)


def test_shards_that_do_not_divide_are_named():
    on = replace(small(), machine=machine("p4d", gpus=1))
    found = plan_job(on, JobSize(256 * 9, 256), [8], None).nodes[0]
    assert math.isclose(found.job_s, 2 * found.group.shard_s(256, 8)) and found.limit == "1.1 shards a group"


def test_a_group_is_of_several_nodes_only_where_one_is_too_small():
    on = request("65B", None, machine("p4d", gpus=1))
    found = plan_job(on, MANY, [2, 4, 8], None)
    assert [(one.nodes, one.groups, one.group.gpus) for one in found.nodes] == [(4, 1, 4), (8, 2, 4)]
    assert [one.option.runs for one in found.groups] == [False, False, True]
    nowhere = plan_job(replace(on, machine=machine("p4d", gpus=1, gib=1.0)), MANY, [1, 2], 1.0)
    assert nowhere.nodes == [] and nowhere.document()["groups"][0]["tokens_per_s"] is None


def test_a_group_is_planned_as_it_would_be_alone():
    on = small()
    for group in plan_job(on, MANY, [1], None).groups:
        assert group.option == search(on, [group.gpus])[0]


def test_the_command(command):
    words = ("task=plan", "model=13B", "draft=none", "cluster=p4d", "cluster.price_per_gpu_hour=4")
    answer = command(*words, "nodes=[1,64]", "task.records=1000", "task.plot=a.svg")
    assert answer.code == 0, answer.err
    job = json.loads(answer.out.splitlines()[-1])["job"]
    assert [row["nodes"] for row in job["nodes"]] == [1, 64] and job["shards"] == 4
    assert "a job of 1000 records in 4 shards" in answer.out and "only 4 shards" in answer.out
    with open("a.svg", encoding="utf-8") as file:
        assert "planned for p4d, 1000 records" in file.read()
    plain = command(*words, "out=null")
    assert json.loads(plain.out.splitlines()[-1])["job"] is None and "a job of" not in plain.out
    nowhere = command(*words, "nodes=[1]", "cluster.gib=1", "out=null")
    assert "it fits on none of these numbers of nodes" in nowhere.out
    for wrong in ("nodes=[1,1]", "cluster.price_per_gpu_hour=-1"):
        assert command(*words, wrong).code == 2
