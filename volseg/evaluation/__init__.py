"""How good a prediction is: counts and overlap per case and label on the original grid, and their summary."""
