"""What steps of an engine cost beside reading and arithmetic. No torch.

A machine's constants are of eager steps on a CPU, and of CUDA graphs on a GPU, where the host launches each
operation of an eager step.
"""

from llama_ssp.config import Steps

# The numbers of operations were counted (tests/far.py, Llama). A launch by Python was measured: a step of 7B
# on an H200 took 31.6 ms (bench/results/gpu_h200_202611.md). A sum over ranks by torch.distributed is an
# estimate.
LAYER_OPERATIONS = 45
STEP_OPERATIONS = 15
ROW_OPERATIONS = 6  # of a layer: eager passes attend one row after the other
LAUNCH_S = 22e-6
SUM_S = 22e-6


def of_constants(on_cpu: bool) -> Steps:
    """Returns the steps that a machine's constants are of: eager ones of a CPU, CUDA graphs of a GPU."""
    return Steps.eager if on_cpu else Steps.compiled


def launching_s(layers: int, rows: int = 1, sums: int = 0) -> float:
    """Returns the seconds in which the host launches an eager pass on a GPU, with these sums over ranks."""
    operations = layers * (LAYER_OPERATIONS + ROW_OPERATIONS * (rows - 1)) + STEP_OPERATIONS
    return operations * LAUNCH_S + sums * SUM_S
