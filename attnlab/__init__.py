"""attnlab: find out why a paged-attention kernel, or the test of one, is wrong."""

__version__ = "0.1.0"
