"""Command lines that once met a fault, found by the fuzzer or beside it, and what must come of them now."""

from __future__ import annotations

from tests.fuzz.overrides import Words

FOUND = (
    # Flags between overrides: the parser's own words and no error line.
    Words(
        ("task=agree", "draft.download=nan", "--resolve", "placement.timeout_s=-1e30"), "draft.download=nan"
    ),
    Words(("seed=1", "--cfg", "job", "speculation.k=2")),
    Words(("cluster.bf16=true", "-m", "seed=1,2", "output=json")),
    Words(("task=compare", "--cfg=job", "/dev/null", "speculation.bridge=auto"), "/dev/null is no override"),
    # A whole group where a list should be: a traceback.
    Words(("task=plan", "cluster.slurm.setup=${sampling}"), "cluster.slurm.setup is a group"),
    Words(("task.stop=${speculation}",), "task.stop is a group"),
    Words(("sampling.bad_tokens=${model}",), "sampling.bad_tokens is a group"),
    Words(("placement.max_memory=${sampling}",), "placement.max_memory is a group"),
    # Numbers and names that nothing looked at.
    Words(("model.sliding_window=-5",), "model.sliding_window=-5"),
    Words(("draft.sliding_window=1" + "0" * 30,), "draft.sliding_window of 31 digits"),
    Words(("task=batch", "task.input=a.jsonl", "task.output="), "task.output is empty"),
    # Odd, and right as it is.
    Words(("cluster.cublas_mib=${oc.env:NOPE}",), "there is no NOPE"),
    Words(("seed=" + "9" * 5000,), "a seed of 5000 digits"),
)
