"""Libraries of kernels as data: one folder per library, one file per op, with the op's record."""
