"""One module for each task that a user can ask for, and the runner."""
