"""Lab: Case in, Result out; the reference, rounding bounds and the error map."""
