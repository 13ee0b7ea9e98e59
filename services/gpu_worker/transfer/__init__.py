"""KV pages from one worker to another, in a thread of their own. Leaves which pages, when and why to the scheduler."""
