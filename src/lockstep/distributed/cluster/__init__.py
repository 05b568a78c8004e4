"""The cluster as its scheduler describes it: tasks, addresses, ports and roles."""
