"""Batch jobs: every record is answered exactly once, whatever is killed when. No torch (but
continuous_batching).

requests.py, source.py     what each line of the input asks for: plain, OpenAI or text
responses.py               how it is answered; every line of the input that is not blank gets one line
job.py                     both with the run's settings
journal.py                 what is done, on disk: readable after any crash, and right at any moment
    run.json                  what the job is: input, settings, shards; written once
    parts/00003.ATTEMPT.jsonl what one attempt at a shard has finished, a line a record, appended
    done/00003.jsonl          a whole shard, in input order; published once, by the first to finish it
    claims/00003              which attempt works on it now
workers.py, local_workers.py, slurm/     groups of ranks that share a job
"""
