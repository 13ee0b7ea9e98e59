"""Every Struct that crosses a process boundary; read this before any service."""
