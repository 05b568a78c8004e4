"""The tools of the command ``lockstep``: scaling reports, migration, and its other subcommands."""
