"""The ranks of a run: placement, roles, process groups, failures, signals.

The only folder with torch.distributed.
"""
