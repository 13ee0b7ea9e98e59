"""Owns every request, the radix tree and all pages; decides each step. Knows neither text nor torch."""
