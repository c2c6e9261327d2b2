"""Prepare cases once, keep them on disk, and share them between processes."""
