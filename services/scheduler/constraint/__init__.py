"""Output that is right the first time: sources become matchers, matchers become masks. Leaves the steps to the loop."""
