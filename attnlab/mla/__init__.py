"""MLA: the chain of partial attentions over latent keys and their merges, checked step by step."""
