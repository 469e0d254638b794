"""The instruments: they read files and run commands, and say what holds, what does not, and where."""
