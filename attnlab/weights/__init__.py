"""Effective attention weights: read them out of any kernel with coded values, and describe what they do.

The output of attention is the sum of weight × value. With one-hot values per cache slot, the output of the
unmodified kernel is the weight of each slot. :func:`attnlab.xray` is the public entry.
"""
