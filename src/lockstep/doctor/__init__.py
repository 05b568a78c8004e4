"""Looks for what makes a training wrong or slow without an error: findings, each with its reason and its cure."""
