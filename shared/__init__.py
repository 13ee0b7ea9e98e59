"""What crosses rooms: messages, transport, configuration, logging. Leaves every decision to the services."""
