"""Building blocks of the own decoder: plain tensors and functions, no module tree."""
