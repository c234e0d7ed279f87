"""Is what a sampler draws the target's distribution? Exact where its rounds can be watched, statistical where
not."""
