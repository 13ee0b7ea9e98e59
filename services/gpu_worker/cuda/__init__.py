"""What makes a worker on CUDA keep its device busy: device-resident state, steps in two halves, graphs."""
