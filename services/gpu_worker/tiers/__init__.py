"""KV pages that have left the device: in the host's memory and in a folder. Leaves which pages to the scheduler."""
