"""What a run needs before it runs: bytes on every rank and milliseconds a token, from shapes alone.

No torch.
"""
