"""What a run needs, before it runs: bytes on every rank, from shapes alone. Closed form, no torch."""
