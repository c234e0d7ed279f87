"""The ranks of a run and what they say to each other; the only room that knows torch.distributed."""
