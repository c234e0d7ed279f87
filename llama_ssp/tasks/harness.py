"""The command of lm-evaluation-harness with the pair as a model (`pip install "llama-ssp[lm-eval]"`).

    llama-ssp-lm-eval run --model llama_ssp --model_args pretrained=/models/70b,draft=/models/1b --tasks gsm8k

This is the harness's own command, which then knows the model. Under torchrun (`-m llama_ssp.tasks.harness`)
every rank runs the harness with the same requests, and gets the leader's answers. Importing this module
registers the model where the harness is installed.
"""

import sys
from contextlib import suppress

from llama_ssp.config.environment import rank_environment
from llama_ssp.errors import DistributedError, RunError
from llama_ssp.models.host_cores import shorten_spins

INSTALL = 'pip install "llama-ssp[lm-eval]", or in a checkout pip install -e ".[lm-eval]"'

shorten_spins()  # before torch is imported
with suppress(ModuleNotFoundError):  # `main` says what is missing
    import lm_eval  # noqa: F401  first: without it torch is not wanted either

    from llama_ssp.tasks.harness_model import HarnessModel as HarnessModel


def main() -> None:
    """Runs the harness's command line; an error of ours is one line, and its code is the exit code."""
    try:
        _run()
    except RunError as error:
        if rank_environment().is_leader:
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.code)


def _run() -> None:
    """Raises DistributedError where the harness is not installed, and what the model raises."""
    try:
        from lm_eval.__main__ import cli_evaluate

        from llama_ssp.tasks import harness_model  # noqa: F401  it registers the model
    except ModuleNotFoundError as missing:
        package = (missing.name or "llama_ssp").partition(".")[0]
        if package == "llama_ssp":
            raise
        raise DistributedError(
            f"{package} is not installed for this Python", where=sys.executable, fix=INSTALL
        ) from None
    cli_evaluate()


if __name__ == "__main__":
    main()
