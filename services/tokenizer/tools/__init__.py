"""Tool calls: what a request may call, how the model writes calls, and how they are read back."""
