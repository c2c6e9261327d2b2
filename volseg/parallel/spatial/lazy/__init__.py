"""Operators that wait for the one behind them."""
