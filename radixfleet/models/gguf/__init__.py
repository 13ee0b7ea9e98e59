"""Converts GGUF files to the Hugging Face layout with numpy alone; leaves caching to the store."""
