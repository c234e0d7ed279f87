"""What 0.2 had and this version has not: keys, values and commands, each with what to write now. No torch.

The table is asked where something is refused, before a similar name is suggested: a preset of the user's own
may have one of these names. CHANGELOG.md has the same in its tables.
"""

from llama_ssp.errors import UsageError

CHAINS = "write speculation=adaptive, or a fixed k=N (docs/fast.md)"
BLOCK = "leave it out: with the block rule, the default, a seed gives one text for one draft and one fixed k"
OTHER_DRAFTS = "the target's MTP layers are not read: name a draft model, or write speculation=ngram"
BRIDGE = "name a draft of the same family, or write bridge=intersection (docs/pairs.md)"
MANIFEST = "copy the manifest of docs/cluster.md, and give it to kubectl create"
FOLDERS = "read summary.json of each run's folder, with jq or pandas"
TOKENIZERS = "name two published models of different tokenizers (docs/pairs.md)"
NODES = "a plan has the fewest GPUs that hold the pair, and ms/token on each number of them (docs/cluster.md)"
ROWS = "leave it out: a pass takes the longer of reading and arithmetic, so more rows cost what they compute"
DEMO = "model.dtype=fp32 draft.dtype=fp32 max_new_tokens=48"

# A key, KEY=VALUE, a command, or task=NAME KEY for what one task has lost. A key stands for those below it.
INSTEAD = {
    "runs": FOLDERS,
    "diff": FOLDERS,
    "completion": 'write eval "$(llama-ssp -sc install=bash)"; install=zsh and install=fish are for others',
    "document": "experiment=NAME runs the models, and docs/compare.md has the figures of write-ups",
    "sampling=default": "write sampling=plain",
    "siblings": CHAINS,
    "speculation.siblings": CHAINS,
    "speculation=tree": CHAINS,
    "speculation=coupled": BLOCK,
    "speculation.verification=coupled": BLOCK,
    "speculation.bridge=text": BRIDGE,
    "draft=mtp": OTHER_DRAFTS,
    "draft.weights=mtp": OTHER_DRAFTS,
    "model.weights=mtp": OTHER_DRAFTS,
    "model=demo_bytes": TOKENIZERS,
    "draft=demo_bytes": TOKENIZERS,
    "experiment=demo": f"write llama-ssp compare sampling=greedy {DEMO} seed=1",
    "experiment=demo_score": "write llama-ssp eval temperature=0.5 seeds=0 sizes=200 seed=1",
    "task=eval plot": "output=json has rows and differences, the figures of the picture",
    "nodes": NODES,
    "records": NODES,
    "task=plan nodes": NODES,
    "task=plan records": NODES,
    "task=plan shard_size": NODES,
    "task=plan plot": NODES,
    "cluster.price_per_gpu_hour": NODES,
    "cluster.times.rows_cost": ROWS,
    "cluster=kubernetes": MANIFEST,
    "cluster.scheduler=kubernetes": MANIFEST,
    "cluster.kubernetes": MANIFEST,
    "cluster.slurm.interface": (
        "write 'cluster.slurm.setup=export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0'"
    ),
    "cluster.slurm.torchrun": (
        "write torchrun's variables, as 'cluster.slurm.setup=export PET_LOG_DIR=/tmp' for --log-dir=/tmp"
    ),
}


def gone(name: str) -> UsageError | None:
    """Returns the error for a name that 0.2 had, written as in INSTEAD; None for one that it had not."""
    named = name
    while named not in INSTEAD and "." in named and "=" not in named:
        named = named.rpartition(".")[0]
    if named not in INSTEAD:
        return None
    return UsageError(f"{name} is gone since 0.2", fix=INSTEAD[named])
