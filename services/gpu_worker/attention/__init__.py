"""One attention interface, several implementations."""
