"""What a run does, decided before it loads: ranks, placement, engine, number formats, K, rows, and why each.

No torch. Every task asks here; the planner below says what each choice would cost.
"""
