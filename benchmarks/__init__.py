"""One module per measured figure; each runs as `python -m benchmarks.NAME [--json]`."""
