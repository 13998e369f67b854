"""Misuses that no signature shows."""
