"""task=certify: is the output distribution the target's?

Exact where rounds can be watched, statistical where not.
"""
