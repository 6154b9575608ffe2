"""Kimi Delta Attention: forward and backward."""
