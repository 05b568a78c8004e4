"""Guards training steps against NaN and Inf, and diagnoses where they come from."""
