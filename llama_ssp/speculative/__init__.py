"""One round of speculation over a target and a drafter: prefill, draft, verify, roll back."""
