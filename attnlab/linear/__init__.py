"""Linear attention: ops that keep a state for each sequence in place of a cache of keys and values."""
