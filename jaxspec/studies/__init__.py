"""The published study of 2510.22876, repeated."""
