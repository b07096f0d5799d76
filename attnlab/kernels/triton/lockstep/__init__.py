"""Lockstep: run all programs of a launch of Triton at once on a CPU, each value with an axis of programs."""
