"""A script for ``tf.distribute`` becomes one for Lockstep: what is sure is translated, the rest is marked."""
