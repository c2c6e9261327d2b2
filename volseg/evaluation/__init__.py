"""Score predictions per case and label on the original grid, and summarise the scores."""
