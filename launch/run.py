"""The command: python launch/run.py ..., or torchrun launch/run.py ..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout, too

from llama_ssp.__main__ import main

if __name__ == "__main__":
    main()
