"""Reasoning: the part of an answer that the model thinks before it speaks."""
