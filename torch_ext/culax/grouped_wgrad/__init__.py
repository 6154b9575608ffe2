"""Grouped weight gradient of mixture-of-experts layers, and the grouped product it belongs to."""
