"""What a batch job has done, on disk: readable after any crash, and right at any moment.

    run.json                  what the job is: input, settings, shards; written once
    parts/00003.ATTEMPT.jsonl what one attempt at a shard has finished, a line a record, appended
    done/00003.jsonl          a whole shard, in input order; published once, by whoever is first
    claims/00003              who is at work on it, while they are

Only files that are complete get their final name. Nothing here knows about models. No torch.
"""

from llama_ssp.journal.journal import Attempt, Journal, Standing
from llama_ssp.journal.manifest import Manifest, Shard, shards_of

__all__ = ["Attempt", "Journal", "Manifest", "Shard", "Standing", "shards_of"]
