"""Models, placement and engine put together: what the Python API, the tasks and the benchmarks use."""
