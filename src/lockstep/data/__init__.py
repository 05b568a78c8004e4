"""How a batch reaches the devices."""
