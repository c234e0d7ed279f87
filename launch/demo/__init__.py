"""The making of the small trained models that ship with llama-ssp."""
