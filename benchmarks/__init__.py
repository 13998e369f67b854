"""One module per claim. Each prints a table and writes JSON; `results/` holds dated runs."""
