"""Cache writes in other formats: a scale per token and head, INT4, keys and values in one cache, MLA's
latents."""
