"""Speed of the culax ops, with machine, roofline and correctness gate: `python -m benchmarks.run --help`."""
