"""The check of a machine: what is there, what it takes, and what to do about each fault."""
