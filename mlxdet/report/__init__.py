"""What people look at: progress while training, summaries, pictures."""
