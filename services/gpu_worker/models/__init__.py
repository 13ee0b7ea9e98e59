"""Models: the own decoder family, the transformers backend and the reading of checkpoints."""
