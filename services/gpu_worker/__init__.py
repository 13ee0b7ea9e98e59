"""Runs forward passes as told, the only room with torch. Decides nothing."""
