"""Kernels of Kimi Delta Attention, one package a stage."""
