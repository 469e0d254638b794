"""The training step, the schedule, the loop around them, and a run on disk."""
