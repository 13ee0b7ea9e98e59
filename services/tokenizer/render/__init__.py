"""Output into the words of each API, whole or as events; leaves when to send them to the exchange."""
