"""task=batch on a Slurm cluster. No torch.

script.py       the sbatch script: an array, each element one group of ranks that does shard after shard
submit.py       prints the script with what Slurm says of it, or submits it
supervisor.py   on the node: starts the ranks, stops them in time, and requeues the job
address.py      on the nodes: addresses by which the nodes of a group reach each other
client.py       calls sbatch, squeue, sacct and scontrol
"""
