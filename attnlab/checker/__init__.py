"""Run every op of a kernel library on hostile cases and report what each op computes wrongly.

This file imports nothing, so that the command line starts without torch.
"""
