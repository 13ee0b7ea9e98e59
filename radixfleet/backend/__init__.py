"""Ways to a model: what the language asks of one (base), our own server (endpoint), OpenAI's API (openai_api)."""
