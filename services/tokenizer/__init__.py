"""The HTTP frontend: text in, text out. Leaves what runs when to the scheduler."""
