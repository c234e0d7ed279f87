"""Batch jobs: every record is answered exactly once, whatever is killed when. No torch, except in
continuous_batching.

requests.py       what each line of the input asks for: plain, OpenAI or text
responses.py      the line that answers it; every line of the input that is not blank gets one
index.py          where each record of the input lies: made once, read by every group
job.py            the input, and the run's settings
journal.py        what is done, on disk: readable after any crash, and right at any moment
    run.json                  the job: input, settings, shards; written once
    trials.json               whether steps over several GPUs are compiled; written once
    parts/00003.ATTEMPT.jsonl what one attempt at a shard has finished, a line a record (attempt_log.py)
    groups/PROCESS.jsonl      the counts of each shard that a process has published
    done/00003.jsonl          a whole shard, in input order; published once, by the first to finish it
    claims/00003              the process that works on it now
status.py         how far a job is, and how fast, from its folder
history.py        how elements of a scheduler's job ended
workers.py, local_workers.py, slurm/     groups of ranks that share a job
"""
