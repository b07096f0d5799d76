"""The int32 horizon: the smallest size at which an int32 value of a kernel wraps, proved by two runs."""
