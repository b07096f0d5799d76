"""Run every op of a kernel library on hostile cases and report what each op computes wrongly."""
