"""``lockstep migrate``: translate a ``tf.distribute`` script to Lockstep; comments mark what needs manual work."""
