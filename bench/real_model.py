"""The published model that benchmarks run, and what they ask it."""

REAL = "smollm2-135m-instruct-q4"
EDIT = (
    "Correct the spelling: Speculativ sampling makes a larg language model fastr. A small draft model "
    "proposes tokens, and the larg model chekcs them all at once."
)
