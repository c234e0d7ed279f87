"""python -m llama_ssp: the command, wherever the package lies."""

from llama_ssp.cli import main

if __name__ == "__main__":
    main()
