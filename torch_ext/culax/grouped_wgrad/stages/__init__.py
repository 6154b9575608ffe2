"""Kernels of the grouped weight gradient, one package a kernel."""
