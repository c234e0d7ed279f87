"""task=batch on a Slurm cluster. No torch.

script.py       the sbatch script: an array, each element one group of ranks
submit.py       prints the script or submits it; reads the queue
supervisor.py   on the node: starts the ranks, stops them in time, and requeues the element
"""
