"""Devices: names, logical CPU devices, memory, determinism settings, and the layout of rows on them."""
