"""Triton's interpreter: patches, tracing and checks."""
