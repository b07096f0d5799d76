"""The study of vLLM #28490: claims, engine recordings and the overview."""
