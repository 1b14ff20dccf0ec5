"""Shared types and protocols."""
