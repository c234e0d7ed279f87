"""task=batch on a Slurm cluster: the script, its submission, and the warden of a job.

    script.py    the sbatch script: an array, each element one group of ranks that does shard after shard
    submit.py    prints it, or hands it over, if anything is missing
    warden.py    on the node: starts the ranks, stops them in time, and asks for another go
    records.py   which jobs were submitted, and how their elements ended
    status.py    where it stands, from the files and from squeue

No torch.
"""
