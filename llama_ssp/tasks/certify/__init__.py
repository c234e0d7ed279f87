"""task=certify: is the output distribution the target's?"""
