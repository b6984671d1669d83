"""Ready-made models on real data that needs no download."""
