"""Losses about label maps, and the form that sharded volumes take."""
