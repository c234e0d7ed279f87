"""Operators of our own, where those of torch leave much of the machine unused."""
