"""Turns token ids into text and finds stop strings. Knows no models and no requests beyond their stream."""
