"""Batch jobs: every record is answered exactly once, whatever is killed when. No torch.

records.py        what each line of the input asks for (plain, OpenAI or text), and the line that answers it
index.py          where each record of the input lies: made once, read by every group
job.py            the input, and the run's settings
journal.py        what is done, on disk: readable after any crash, and right at any moment (docs/batch.md)
attempts.py       which process works on which shard, and what it has finished; the thread that writes
status.py         how far a job is, and how fast, from its folder
workers.py, slurm/ groups of ranks that share a job
"""
