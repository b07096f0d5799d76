"""Benchmarks of the lab: its own speed, the interpreter, the emulated device and the diagnosis."""
