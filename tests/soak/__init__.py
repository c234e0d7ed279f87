"""Endurance: random runs of the command on the demo pair, some of them struck, until the time is up.

python -m tests.soak [minutes=10] [seed=N] [write=FILE.md]

scenarios.py   what is run, and what befalls it
processes.py   everything a run has started: how much it holds, whether anything is left of it
trials.py      one scenario, and what was wrong with it
verdict.py     what only many runs together can show: the distribution, memory, handles; the report
"""
