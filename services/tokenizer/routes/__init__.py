"""One module per family of endpoints; leaves validation, sampling and rendering to their own modules."""
