"""task=batch on Kubernetes. No torch.

manifest.py   the Indexed Job: each index is a pod of a group; and the Service of groups of several pods
submit.py     prints it, or gives it to kubectl
pod.py        in the pod: starts the ranks, stops them, and tells Kubernetes by its exit code what is next
"""
