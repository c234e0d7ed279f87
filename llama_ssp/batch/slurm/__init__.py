"""task=batch on a Slurm cluster: submit.py makes an array, supervisor.py runs one element of it. No torch."""
