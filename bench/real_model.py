"""The published model that benchmarks run, and what they ask it."""

REAL = "smollm2-135m-instruct-q4"
# It answers this right, and drafts found in the prompt are often right, too.
PROMPT = (
    "Write this list again, in the same order: apples, bananas, cherries, dates, elderberries, figs, grapes, "
    "honeydew melons, kiwis, lemons."
)
