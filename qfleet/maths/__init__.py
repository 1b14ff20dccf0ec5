"""Pure, unreduced tensor functions."""
