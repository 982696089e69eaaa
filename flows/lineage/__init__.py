"""Where an artifact comes from: the graph of what made it, and the ways to show it."""
