"""Tensor parallelism: one worker as a group of ranks that hold a share of every layer each."""
