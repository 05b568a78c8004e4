"""Steps whose numbers are not finite: seen, kept from the weights, explained, and answered as was asked for."""
