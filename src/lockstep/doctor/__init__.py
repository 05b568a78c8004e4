"""Checks that find what makes training wrong or slow without an error; each finding has a reason and a remedy."""
