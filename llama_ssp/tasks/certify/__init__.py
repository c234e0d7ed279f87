"""Is what a sampler draws the target's law? Exact where its rounds can be watched, statistical where not."""
