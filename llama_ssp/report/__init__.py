"""What is printed or saved: run folder, console, tables, plots, live view, statistics. No torch."""
