"""Shared types and protocols, and small functions without dependencies on other packages."""
