"""Backends: the models, vLLM's Triton and ROCm sources, its CPU op, and user functions."""
