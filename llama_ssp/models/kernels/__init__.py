"""Our own CPU and GPU kernels, where those of torch leave much of the machine unused."""
